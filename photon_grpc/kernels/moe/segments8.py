"""Products of experts that many tokens reach, weights and activations in 8 bits, in one Gluon kernel (sm_90).

`segments.py` multiplies 16 bits so. Rows are rounded before they are brought together, x once for all experts of a
token.

A program takes tiles of up to 128 pairs of an entry and 128 rows of W, of gate and up 64 each. One warp fetches steps
of 128 columns of both into a ring; each of two groups of four warps multiplies 64 pairs. While one group adds sums or
ends a tile, the other has the tensor cores. A group without pairs only lets steps pass, and its rows are not fetched.

Sums are those of `wide8.py`: e4m3 of 128 columns from zero, added forwards in float32; int8 exact. So it is in
`products.py`: the bits are the same. Blocks with scales are left to the kernels of few tokens.

Shapes: x [T, H], Stack of 8 bits with scales of rows [E, N, K], K a multiple of 16, Routing with entries of 128 pairs.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.gluon import (
    TensorDescriptor,
    dependent_launch,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
)
from photon_grpc.kernels.lang.jit import jit, num_multiprocessors, tl
from photon_grpc.kernels.linear import quantize
from photon_grpc.kernels.linear.wide8_sums import box_layout
from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.segment_tiles8 import (
    SegmentProblem8,
    SegmentTile8,
    each_tile,
    fetch,
    multiply,
    of_second_group,
    tiles_across,
)
from photon_grpc.kernels.moe.stacks import Stack

#: 128 rows of W, six steps in flight; of e4m3 two overlap.
TILE = SegmentTile8(HALVES=2, NS=6, TURN=2)


@jit
def gather8_kernel(
    x, scales, found, found_scales, work, num_tokens,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the rows, of WIDTH elements, of ROWS pairs of one entry per program, and their scales."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.program_id(0)
    if entry < tl.load(work.size):
        expert, first = tl.load(work.expert + entry).to(tl.int64), tl.load(work.first + entry)
        count, row = tl.load(work.count + entry), tl.load(work.row + entry)
        within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_pair = first + within < count
        has = is_pair[:, None]
        token = tl.load(work.pairs + expert * num_tokens + first + within, mask=is_pair, other=0) // TOP_K
        source = x + token.to(tl.int64)[:, None] * WIDTH
        to = found + (row + within).to(tl.int64)[:, None] * WIDTH
        for start in range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = has & (column < WIDTH)
            tl.store(to + column, tl.load(source + column, mask=inside, other=0), mask=inside)
        tl.store(found_scales + row + within, tl.load(scales + token, mask=is_pair, other=0.0), mask=is_pair)


@gluon_jit
def segment8_kernel(
    x, x_scale, w, w_scale, y, work, num_tokens, P: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fill y [pairs, SPAN] in the order of the work list, or with SPAN 0 float32 y [pairs, N] in that of pairs.

    x: a descriptor of rows in the order of the work list; w: of W [E · N, K]. x_scale: float32 [rows], w_scale: float32
    [E, N]. P is a SegmentProblem8, W a SegmentTile8; four warps.
    """
    NS: gl.constexpr = W.NS
    kind: gl.constexpr = x.dtype
    ws = gl.allocate_shared_memory(kind, [NS, 64 * W.HALVES, W.STEP], box_layout(2))
    xs = gl.allocate_shared_memory(kind, [NS * 2, 64, W.STEP], box_layout(2))
    # Nothing reads this where results have 32 bits.
    staged = ws
    if P.SPAN > 0:
        shape: gl.constexpr = [2, 64, 32 * W.HALVES]
        staged = gl.allocate_shared_memory(y.dtype.element_ty, shape, gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NS):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ring = (ws, xs, ready, free)
    results = ((w_scale, x_scale), staged, y, work, num_tokens)
    of_groups: gl.constexpr = multiply
    of_fetcher: gl.constexpr = fetch
    second: gl.constexpr = of_second_group(W)
    gl.warp_specialize(
        [
            (each_tile, (ring, work, results, of_groups, P, W)),
            (each_tile, (ring, work, results, of_groups, P, second)),
            (each_tile, (ring, work, (x, w), of_fetcher, P, W)),
        ],
        [4, 1],
        [240, 24],
    )


def takes(stack: Stack) -> bool:
    """Return whether the kernel multiplies by this stack of 8 bits."""
    return stack.shape[2] % 16 == 0 and not stack.has_blocks


def gathered(x: torch.Tensor, scales: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all pairs in the order of the work list, and their scales; behind the last are undefined."""
    (num_tokens, top_k), work = routing.experts.shape, routing.work
    assert work is not None
    found = torch.empty((num_tokens * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    found_scales = torch.empty(num_tokens * top_k, dtype=scales.dtype, device=x.device)
    # Bytes are copied in twos.
    source, to = x.view(torch.int16), found.view(torch.int16)
    gather8_kernel[(work.expert.shape[0], routing.block // 16)](
        source, scales, to, found_scales, work, num_tokens, TOP_K=top_k, WIDTH=source.shape[1], ROWS=16, COLUMNS=512,
        num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    return found, found_scales


def gate_up(x: torch.Tensor, routing: Routing, stack: Stack) -> torch.Tensor:
    """Return y [pairs, I] of x [T, H], in the order of the work list."""
    size = stack.shape[1] // 2
    y = torch.empty((routing.experts.numel(), size), dtype=x.dtype, device=x.device)
    values, scales, _ = quantize.launch(x, stack.values.dtype)
    _launch(*gathered(values, scales, routing), y, routing, stack, size)
    return y


def down(y: torch.Tensor, routing: Routing, stack: Stack) -> torch.Tensor:
    """Return z [pairs, H] of what `gate_up` returns; rows of pairs that reach no expert are undefined."""
    z = torch.empty((y.shape[0], stack.shape[1]), dtype=torch.float32, device=y.device)
    values, scales, _ = quantize.launch(y, stack.values.dtype)
    _launch(values, scales, z, routing, stack, 0)
    return z


def _launch(
    x: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, routing: Routing, stack: Stack, span: int
) -> None:  # fmt: skip
    """Fill y from rows [pairs, K] in the order of the work list and their scales."""
    work, (_, n, k) = routing.work, stack.shape
    assert work is not None
    grid = (min(work.expert.shape[0] * tiles_across(n, span, TILE.HALVES), num_multiprocessors(x.device)),)
    segment8_kernel[grid](
        _descriptor(x), scales, _descriptor(stack.values.view(-1, k)), stack.scales, y, work,
        routing.experts.shape[0], SegmentProblem8(n, k, span), TILE, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor) -> TensorDescriptor:
    """Return the bulk copy engine's view of a matrix; what is behind its ends reads as zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [64, TILE.STEP], box_layout(2))
