"""Products of experts that many tokens reach, weights and activations in 8 bits, in one Gluon kernel (sm_90).

`segments.py` multiplies 16 bits so. Rows are rounded before they are brought together, x once for all experts of a
token.

A program takes tiles of up to 128 pairs of an entry and 128 rows of W, of gate and up 64 each. One warp fetches steps
of 128 columns of both into a ring; each of two groups of four warps multiplies 64 pairs. While one group adds sums or
ends a tile, the other has the tensor cores. A group without pairs only lets steps pass, and its rows are not fetched.

Sums are those of `wide8.py`: e4m3 of 128 columns from zero, added forwards in float32, of blocks each times its scales;
int8 exact. So it is in `products.py`: the bits are the same. Scales of a step are loaded a step ahead, into registers.

Shapes: x [T, H], Stack of 8 bits [E, N, K], K a multiple of 16, of blocks N one of 128; Routing with entries of 128
pairs.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.gluon import (
    TensorDescriptor,
    dependent_launch,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
)
from photon_grpc.kernels.lang.jit import num_multiprocessors
from photon_grpc.kernels.lang.ring import begin_ring
from photon_grpc.kernels.linear import quantize
from photon_grpc.kernels.linear.quantize import QuantizedRows
from photon_grpc.kernels.linear.wide8_sums import box_layout
from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.segment_tiles8 import (
    SegmentTile8,
    columns_of,
    each_tile,
    fetch,
    multiply,
    of_second_group,
)
from photon_grpc.kernels.moe.segment_work import SegmentProblem, gathered, tiles_across
from photon_grpc.kernels.moe.stacks import Stack

#: 128 rows of W, six steps in flight; of e4m3 two overlap.
TILE = SegmentTile8(HALVES=2, NS=6, TURN=2)


@gluon_jit
def segment8_kernel(
    x, x_scale, x_stride, w, w_scale, y, work, num_tokens, P: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """Fill y [pairs, SPAN] in the order of the work list, or with SPAN 0 float32 y [pairs, N] in that of pairs.

    x: a descriptor of rows in the order of the work list; w: of W [E · N, K]. x_scale: float32 [rows], w_scale: float32
    [E, N]; of blocks [K / 128, rows], rows x_stride apart, and [E, K / 128, N / 128]. P is a SegmentProblem, W a
    SegmentTile8; four warps.
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
    ready, free = begin_ring(NS, 2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ring = (ws, xs, ready, free)
    results = ((w_scale, x_scale, x_stride), staged, y, work, num_tokens)
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
    _, n, k = stack.shape
    # 64 rows of gate, and 64 of up, have one scale.
    return k % 16 == 0 and (not stack.has_blocks or n % 128 == 0)


def tile_for(stack: Stack) -> SegmentTile8:
    """Return the tile of a product by this stack."""
    return TILE._replace(BLOCKS=stack.has_blocks)


def gate_up(x: torch.Tensor, routing: Routing, stack: Stack) -> torch.Tensor:
    """Return y [pairs, I] of x [T, H], in the order of the work list."""
    size = stack.shape[1] // 2
    y = torch.empty((routing.experts.numel(), size), dtype=x.dtype, device=x.device)
    rows = quantize.launch(x, stack.values.dtype, grouped=stack.has_blocks)
    values, scales = gathered(rows.values, rows.scales, routing)
    assert scales is not None
    _launch(QuantizedRows(values, scales), y, routing, stack, size)
    return y


def down(y: torch.Tensor, routing: Routing, stack: Stack) -> torch.Tensor:
    """Return z [pairs, H] of what `gate_up` returns; rows of pairs that reach no expert are undefined."""
    z = torch.empty((y.shape[0], stack.shape[1]), dtype=torch.float32, device=y.device)
    _launch(quantize.launch(y, stack.values.dtype, grouped=stack.has_blocks), z, routing, stack, 0)
    return z


def _launch(x: QuantizedRows, y: torch.Tensor, routing: Routing, stack: Stack, span: int) -> None:
    """Fill y from rows [pairs, K] in the order of the work list."""
    work, (_, n, k) = routing.work, stack.shape
    assert work is not None
    problem, tile = SegmentProblem(n, k, span), tile_for(stack)
    tiles = work.expert.shape[0] * tiles_across(n, span, columns_of(span, tile.HALVES))
    segment8_kernel[(min(tiles, num_multiprocessors(y.device)),)](
        _descriptor(x.values), x.scales, x.stride, _descriptor(stack.values.view(-1, k)), stack.scales, y, work,
        routing.experts.shape[0], problem, tile, num_warps=4, **dependent_launch(y.device),
    )  # fmt: skip


def _descriptor(matrix: torch.Tensor) -> TensorDescriptor:
    """Return the bulk copy engine's view of a matrix; what is behind its ends reads as zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [64, TILE.STEP], box_layout(2))
