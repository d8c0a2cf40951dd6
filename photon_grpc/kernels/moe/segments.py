"""Products of experts that many tokens reach, each in one Gluon kernel (sm_90). `experts.py` has the formulas.

The rows that an expert has are brought together first: x [pairs, H] in the order of the work list, so that the bulk
copy engine reads them as it reads the rows of a matrix. y [pairs, I] lies in the same order; z is scattered to the
pairs' own rows, which the sum over a token's experts reads.

A program takes tiles of up to 128 pairs of an entry and 256 rows of W, one after the other, with warps specialised as
in `many_rows.py`: one fetches steps of 64 columns of both into a ring, each of two groups of four warps multiplies 64
pairs. Of gate and up 128 rows each, so that a thread has the numbers of both. A group without pairs only lets steps
pass. K is one chain of products, as in `products.py`: the bits are the same. `segments8.py` multiplies in 8 bits.

Shapes: x [T, H], Stack of 16 bits [E, N, K], Routing with entries of BLOCK pairs. bf16 and fp16; H and I multiples of
8. Bytes moved: a row of x three times for every pair, W once for every entry of its expert, most of them by the cache.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.lang.gluon import (
    TensorDescriptor,
    constexpr_function,
    gl,
    gluon_jit,
    has_wgmma,
    mbarrier,
    tma,
)
from photon_grpc.kernels.lang.jit import num_multiprocessors
from photon_grpc.kernels.lang.ring import begin_ring
from photon_grpc.kernels.linear.many_rows import GROUP_ROWS, STEP, ManyTile, multiply_slice, step_layout
from photon_grpc.kernels.moe import segments8
from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.segment_work import (
    SegmentProblem,
    gathered,
    pass_by,
    tile_of,
    tiles_across,
    write_gated,
    write_sums,
)
from photon_grpc.kernels.moe.stacks import Stack

#: Pairs of an entry, rows of W of a tile.
BLOCK, ROWS = 128, 256
#: Two groups of warps; a tile of W in halves; four steps in flight.
TILE = ManyTile(2, 2, 0, 4, 240, 24)
#: The fewest pairs of an expert, on the average, for each byte of a number of W: fewer are multiplied while W is read.
MIN_PAIRS = 32


@constexpr_function
def columns_of(span: int) -> int:
    """Return the columns of results of a tile."""
    return ROWS // 2 if span else ROWS


@gluon_jit
def consume(ring, staged, y, work, num_tokens, GROUP: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Multiply the pairs of one group of four warps, tile after tile."""
    STEPS: gl.constexpr = (P.K + 63) // 64
    COLUMNS: gl.constexpr = columns_of(P.SPAN)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    number = 0
    tiles = gl.load(work.size) * tiles_across(P.N, P.SPAN, COLUMNS)
    found = tile_of(work, gl.program_id(0), tiles, P, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, column, row, begin, count = found
        # The next one is known when this one ends.
        found = tile_of(work, tile + gl.num_programs(0), tiles, P, COLUMNS)
        left = count - begin - GROUP * 64
        if left > 0:
            if P.SPAN == 0:
                pairs = work.pairs + expert.to(gl.int64) * num_tokens + begin + GROUP * 64
                pair = gl.load(pairs + place, mask=place < left, other=-1)
            first, second, number = multiply_slice(ring, number, STEPS, GROUP, TILE, layout)
            if P.SPAN > 0:
                write_gated(first, second, staged.index(GROUP), y, (row + GROUP * 64, column, left), P)
            else:
                write_sums(first, y, pair, column, P)
                write_sums(second, y, pair, column + 128, P)
        else:
            number = pass_by(ring[2:], number, STEPS, TILE.STAGES)


@gluon_jit
def fetch(x, w, ring, work, P: gl.constexpr, TILE: gl.constexpr):
    """Fetch the steps of all tiles into the ring: the program of the fetching warp."""
    xs, ws, ready, free = ring
    NS: gl.constexpr = TILE.STAGES
    COLUMNS: gl.constexpr = columns_of(P.SPAN)
    number = 0
    tiles = gl.load(work.size) * tiles_across(P.N, P.SPAN, COLUMNS)
    found = tile_of(work, gl.program_id(0), tiles, P, COLUMNS)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, column, row, begin, count = found
        found = tile_of(work, tile + gl.num_programs(0), tiles, P, COLUMNS)
        is_full = count - begin > 64
        of_w = expert * P.N + column
        for step in range((P.K + 63) // 64):
            stage = number % NS
            mbarrier.wait(free.index(stage), (number // NS + 1) & 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (128 + 256) * 128, pred=is_full)
            mbarrier.expect(bar, (64 + 256) * 128, pred=not is_full)
            tma.async_copy_global_to_shared(x, [row, step * 64], bar, xs.index(stage * 2))
            tma.async_copy_global_to_shared(x, [row + 64, step * 64], bar, xs.index(stage * 2 + 1), pred=is_full)
            SECOND: gl.constexpr = P.SPAN if P.SPAN > 0 else 128
            tma.async_copy_global_to_shared(w, [of_w, step * 64], bar, ws.index(stage).slice(0, 128))
            tma.async_copy_global_to_shared(w, [of_w + SECOND, step * 64], bar, ws.index(stage).slice(128, 128))
            number += 1


@gluon_jit
def segment_kernel(x, w, y, work, num_tokens, P: gl.constexpr, TILE: gl.constexpr):
    """Fill y [pairs, SPAN] in the order of the work list, or with SPAN 0 float32 y [pairs, N] in that of pairs.

    x: a descriptor of rows in the order of the work list; w: of W [E · N, K]. A SegmentProblem; four warps.
    """
    NS: gl.constexpr = TILE.STAGES
    kind: gl.constexpr = x.dtype
    swizzle: gl.constexpr = step_layout()
    xs = gl.allocate_shared_memory(kind, [NS * 2, 64, 64], swizzle)
    ws = gl.allocate_shared_memory(kind, [NS, 256, 64], swizzle)
    staged = ws
    if P.SPAN > 0:
        staged = gl.allocate_shared_memory(kind, [2, 64, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    ready, free = begin_ring(NS, 2)
    ring = (xs, ws, ready, free)
    gl.warp_specialize(
        [
            (consume, (ring, staged, y, work, num_tokens, 0, P, TILE)),
            (consume, (ring, staged, y, work, num_tokens, 1, P, TILE)),
            (fetch, (x, w, ring, work, P, TILE)),
        ],
        [4, 1],
        [TILE.REGISTERS, TILE.FETCH_REGISTERS],
    )


def suits(num_pairs: int, dtype: torch.dtype, stack: Stack) -> bool:
    """Return whether the kernels multiply so many pairs by this stack, and are faster than those of few."""
    least = MIN_PAIRS * stack.values.element_size() * stack.shape[0]
    is_many = dtype.itemsize == 2 and num_pairs >= least and has_wgmma(stack.values.device)
    fits = segments8.takes(stack) if stack.is_eight else stack.values.dtype == dtype and stack.shape[2] % 8 == 0
    return fits and is_many


def gate_up(x: torch.Tensor, routing: Routing, stack: Stack) -> torch.Tensor:
    """Return y [pairs, I] of x [T, H], in the order of the work list."""
    if stack.is_eight:
        return segments8.gate_up(x, routing, stack)
    size = stack.shape[1] // 2
    y = torch.empty((routing.experts.numel(), size), dtype=x.dtype, device=x.device)
    _launch(gathered(x, None, routing)[0], y, routing, stack, size)
    return y


def down(y: torch.Tensor, routing: Routing, stack: Stack) -> torch.Tensor:
    """Return z [pairs, H] of what `gate_up` returns; rows of pairs that reach no expert are undefined."""
    if stack.is_eight:
        return segments8.down(y, routing, stack)
    z = torch.empty((y.shape[0], stack.shape[1]), dtype=torch.float32, device=y.device)
    _launch(y, z, routing, stack, 0)
    return z


def _launch(x: torch.Tensor, y: torch.Tensor, routing: Routing, stack: Stack, span: int) -> None:
    _, n, k = stack.shape
    assert routing.work is not None
    problem = SegmentProblem(n, k, span)
    tiles = routing.work.expert.shape[0] * tiles_across(n, span, columns_of(span))
    grid = (min(tiles, num_multiprocessors(x.device)),)
    of_x, of_w = _descriptor(x, GROUP_ROWS), _descriptor(stack.values.view(-1, k), ROWS // 2)
    num_tokens = routing.experts.shape[0]
    segment_kernel[grid](of_x, of_w, y, routing.work, num_tokens, problem, TILE, num_warps=4)


def _descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the bulk copy engine's view of a matrix; what is behind its ends reads as zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, STEP], step_layout())
