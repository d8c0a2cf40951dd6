"""Products with K in slices at many rows of x, in one Gluon kernel that adds the slices' sums in registers (sm_90).

    sum = sums[0] + … + sums[S - 1],  sums[s] = x[:, slice s] W[:, slice s]ᵀ,  slices added in order in float32
    product:  y = round(sum)
    add:      h = round(round(sum) + round(h + b))

The matrix library writes the sums of slices in float32 and another kernel reads them again; this one writes 16 bits.
Both give the same bits.

A program takes tiles of 64 · GROUPS rows of x and 128 · HALVES rows of W, one after the other. Its warps are
specialised as in `hopper_varlen.py`: one fetches steps of 64 columns of x and W through the bulk copy engine into a
ring, and goes on with the next tile while the last one is written; each of GROUPS groups of four warps multiplies 64
rows of x. The sums of the slices before the current one stay in registers, or in shared memory where registers have no
room.

Shapes: x [T, K] and W [N, K] contiguous, h and y [T, N] contiguous, b [N] or None. bf16 and fp16; N and K multiples of
8. Operations: 2 · T · N · K. `slices.py` has the reference.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import (
    TensorDescriptor,
    constexpr_function,
    gl,
    gluon_jit,
    has_wgmma,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from photon_grpc.kernels.lang.jit import cdiv, num_multiprocessors, once
from photon_grpc.kernels.lang.ring import begin_ring
from photon_grpc.kernels.linear.cut import slice_columns

#: Columns of a step: what a swizzled row of shared memory holds.
STEP = 64
#: Rows of x of a group of four warps, and rows of W that are multiplied at once.
GROUP_ROWS, HALF_ROWS = 64, 128


class ManyTile(NamedTuple):
    """Constants that the kernel is compiled for.

    GROUPS of warps, HALVES of 128 rows of W, of which the last KEPT have their sums of earlier slices in shared memory,
    STAGES in flight, registers of a group's and of the fetching warp's threads.
    """

    GROUPS: int
    HALVES: int
    KEPT: int
    STAGES: int
    REGISTERS: int
    FETCH_REGISTERS: int


class ManyProblem(NamedTuple):
    """W [N, K] with K in SLICES; ADDS: to h, else a product."""

    N: int
    K: int
    SLICES: int
    ADDS: bool


@constexpr_function
def step_layout():
    """Return the layout of the rows of a step in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon_jit
def multiply_slice(
    ring, number, steps, GROUP: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Return the sums of the next steps, one [64, 128] for each half, and the number of the step after them."""
    xs, ws, ready, free = ring
    NS: gl.constexpr = TILE.STAGES
    GROUPS: gl.constexpr = TILE.GROUPS
    first = gl.zeros([64, 128], gl.float32, layout)
    second = gl.zeros([64, 128], gl.float32, layout) if TILE.HALVES == 2 else first
    for i in range(steps):
        stage = number % NS
        mbarrier.wait(ready.index(stage), number // NS & 1)
        x = xs.index(stage * GROUPS + GROUP)
        w = ws.index(stage)
        first = warpgroup_mma(x, w.slice(0, 128).permute([1, 0]), first, is_async=True)
        if TILE.HALVES == 2:
            second = warpgroup_mma(x, w.slice(128, 128).permute([1, 0]), second, is_async=True)
            first, second = warpgroup_mma_wait(2, deps=[first, second])
        else:
            first = warpgroup_mma_wait(1, deps=[first])
        # The step before is done; the one before a slice was given back at its end.
        mbarrier.arrive(free.index((number + NS - 1) % NS), count=1, pred=i > 0)
        number += 1
    if TILE.HALVES == 2:
        first, second = warpgroup_mma_wait(0, deps=[first, second])
    else:
        first = warpgroup_mma_wait(0, deps=[first])
        second = first
    mbarrier.arrive(free.index((number + NS - 1) % NS), count=1)
    return first, second, number


@gluon_jit
def write(sums, staged, to, row, column, P: gl.constexpr):
    """End a tile [64, 128] of sums by way of shared memory, in which neighbours of a row are brought together."""
    y, bias, num_rows, _ = to
    kind: gl.constexpr = y.dtype.element_ty
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    staged.store(sums.to(kind))
    token = row + gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    column = column + gl.arange(0, 128, layout=gl.SliceLayout(0, copy))
    inside = (token < num_rows)[:, None] & (column < P.N)[None, :]
    at = y + token.to(gl.int64)[:, None] * P.N + column[None, :]
    tile = staged.load(copy)
    if P.ADDS:
        residual = gl.load(at, mask=inside, other=0.0).to(gl.float32)
        if bias is not None:
            added = gl.load(bias + column, mask=column < P.N, other=0.0).to(gl.float32)
            residual = (residual + added[None, :]).to(kind).to(gl.float32)
        tile = (tile.to(gl.float32) + residual).to(kind)
    gl.store(at, tile, mask=inside)


@gluon_jit
def consume(ring, kept, to, GROUP: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Multiply the rows of x of one group of four warps, tile after tile."""
    _, ws, _, _ = ring
    _, _, _, num_tiles = to
    HALVES: gl.constexpr = TILE.HALVES
    SLICES: gl.constexpr = P.SLICES
    COLUMNS: gl.constexpr = slice_columns(P.K, SLICES)
    FIRST: gl.constexpr = (P.K + 63) // 64 if SLICES == 1 else COLUMNS // 64
    ACROSS: gl.constexpr = (P.N + 128 * HALVES - 1) // (128 * HALVES)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    staging: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    own = kept.index(GROUP)
    staged = own._reinterpret(ws.dtype, [64, 128], staging)
    number = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first, second, number = multiply_slice(ring, number, FIRST, GROUP, TILE, layout)
        for part in range(1, SLICES):
            # `second` is the half whose sums leave the registers; with one half and KEPT it is the only one.
            if TILE.KEPT:
                own.store(second)
            before = first
            # The last slice may have fewer.
            steps = (gl.minimum(COLUMNS, P.K - part * COLUMNS) + 63) // 64
            first, second, number = multiply_slice(ring, number, steps, GROUP, TILE, layout)
            if TILE.KEPT:
                second = own.load(layout) + second
            if HALVES == 2 or not TILE.KEPT:
                first = before + first
            else:
                first = second
        row = (tile // ACROSS * TILE.GROUPS + GROUP) * 64
        column = tile % ACROSS * (128 * HALVES)
        write(first, staged, to, row, column, P)
        if HALVES == 2:
            write(second, staged, to, row, column + 128, P)


@gluon_jit
def fetch(x, w, ring, num_tiles, P: gl.constexpr, TILE: gl.constexpr):
    """Fetch the steps of all tiles into the ring: the program of the fetching warp."""
    xs, ws, ready, free = ring
    NS: gl.constexpr = TILE.STAGES
    GROUPS: gl.constexpr = TILE.GROUPS
    ROWS: gl.constexpr = 128 * TILE.HALVES
    ACROSS: gl.constexpr = (P.N + ROWS - 1) // ROWS
    number = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row = tile // ACROSS * (GROUPS * 64)
        column = tile % ACROSS * ROWS
        for step in range((P.K + 63) // 64):
            stage = number % NS
            mbarrier.wait(free.index(stage), (number // NS + 1) & 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (GROUPS * 64 + ROWS) * 128)
            for group in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(x, [row + group * 64, step * 64], bar, xs.index(stage * GROUPS + group))
            tma.async_copy_global_to_shared(w, [column, step * 64], bar, ws.index(stage))
            number += 1


@gluon_jit
def many_rows_kernel(x, w, to, num_rows, P: gl.constexpr, TILE: gl.constexpr):
    """Multiply x [num_rows, K] by W [N, K] of a ManyProblem; four warps. to: y [num_rows, N], h with ADDS, and b."""
    y, bias = to
    NS: gl.constexpr = TILE.STAGES
    GROUPS: gl.constexpr = TILE.GROUPS
    kind: gl.constexpr = y.dtype.element_ty
    swizzle: gl.constexpr = step_layout()
    xs = gl.allocate_shared_memory(kind, [NS * GROUPS, 64, 64], swizzle)
    ws = gl.allocate_shared_memory(kind, [NS, 128 * TILE.HALVES, 64], swizzle)
    apart: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    # Results go through it as well, in 16 bits.
    KEPT: gl.constexpr = 128 if TILE.KEPT else 64
    kept = gl.allocate_shared_memory(gl.float32, [GROUPS, 64, KEPT], apart)
    ready, free = begin_ring(NS, GROUPS)
    ring = (xs, ws, ready, free)
    ROWS: gl.constexpr = 128 * TILE.HALVES
    num_tiles = (num_rows + GROUPS * 64 - 1) // (GROUPS * 64) * ((P.N + ROWS - 1) // ROWS)
    to = (y, bias, num_rows, num_tiles)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (ring, kept, to, 0, P, TILE)),
                (consume, (ring, kept, to, 1, P, TILE)),
                (fetch, (x, w, ring, num_tiles, P, TILE)),
            ],
            [4, 1],
            [TILE.REGISTERS, TILE.FETCH_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (ring, kept, to, 0, P, TILE)),
                (consume, (ring, kept, to, 1, P, TILE)),
                (consume, (ring, kept, to, 2, P, TILE)),
                (fetch, (x, w, ring, num_tiles, P, TILE)),
            ],
            [4, 4, 1],
            [TILE.REGISTERS, TILE.REGISTERS, TILE.FETCH_REGISTERS],
        )


class TileCost(NamedTuple):
    """Microseconds of a tile's step of 64 columns and of its end, on an H200 with all multiprocessors at work."""

    step: float
    end: float


#: Those that are considered.
TILES = {
    ManyTile(2, 2, 1, 3, 240, 24): TileCost(0.68, 6.0),
    ManyTile(2, 1, 0, 6, 240, 24): TileCost(0.365, 2.5),
    ManyTile(3, 1, 0, 4, 160, 32): TileCost(0.54, 3.0),
}
#: Of the library: operations a microsecond, and bytes of sums that it stores and another kernel reads.
LIBRARY_MATRIX, LIBRARY_BYTES = 7.7e8, 4.0e6
#: The part of the library's time that a tile must stay below: the model is not more exact than that.
MARGIN = 0.95


def choose(x: torch.Tensor, w: torch.Tensor, slices: int) -> ManyTile | None:
    """Return how to multiply; None if the matrix library is faster or no tile can."""
    (num_rows, k), n = x.shape, w.shape[0]
    if slices == 1 or num_rows < 2 or n % 8 or k % 8 or x.dtype.itemsize != 2 or not has_wgmma(x.device):
        return None
    if not x.is_contiguous():
        return None
    return _choose(num_rows, n, k, slices, num_multiprocessors(x.device))


@cache
def _choose(rows: int, n: int, k: int, slices: int, multiprocessors: int) -> ManyTile | None:
    def us(tile: ManyTile) -> float:
        """Return the microseconds of its waves."""
        waves = cdiv(num_tiles(tile, rows, n), multiprocessors)
        return waves * (cdiv(k, STEP) * TILES[tile].step + TILES[tile].end)

    best = min(TILES, key=us)
    stored = 2 * 4 * slices * rows * n / LIBRARY_BYTES
    return best if us(best) < MARGIN * (2 * n * k * rows / LIBRARY_MATRIX + stored) else None


def num_tiles(tile: ManyTile, rows: int, n: int) -> int:
    return cdiv(rows, GROUP_ROWS * tile.GROUPS) * cdiv(n, HALF_ROWS * tile.HALVES)


def product(x: torch.Tensor, w: torch.Tensor, slices: int, tile: ManyTile) -> torch.Tensor:
    """Return the product [T, N]."""
    y = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, w, y, None, ManyProblem(*w.shape, slices, ADDS=False), tile)
    return y


def add(h: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, slices: int, tile: ManyTile) -> None:
    """Change h."""
    launch(x, w, h, b, ManyProblem(*w.shape, slices, ADDS=True), tile)


def launch(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, b: torch.Tensor | None, problem: ManyProblem, tile: ManyTile
) -> None:
    """Fill y, or change it with ADDS."""
    if not torch.cuda.is_current_stream_capturing():
        preload(x.device, x.dtype, problem, b is not None)
    _launch(x, w, y, b, problem, tile)


@once
def preload(device: torch.device, dtype: torch.dtype, problem: ManyProblem, has_bias: bool) -> None:
    """Compile and load the kernel for every tile, in a warm-up: prompts of other lengths take others."""
    x, w = torch.zeros((2, 16, problem.K), dtype=dtype, device=device)
    y = torch.zeros((16, problem.N), dtype=dtype, device=device)
    for tile in TILES:
        _launch(x, w, y, y[0] if has_bias else None, problem, tile)


def _launch(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, b: torch.Tensor | None, problem: ManyProblem, tile: ManyTile
) -> None:
    num_rows = x.shape[0]
    grid = (min(num_tiles(tile, num_rows, problem.N), num_multiprocessors(x.device)),)
    of_x, of_w = _descriptor(x, GROUP_ROWS), _descriptor(w, HALF_ROWS * tile.HALVES)
    many_rows_kernel[grid](of_x, of_w, (y, b), num_rows, problem, tile, num_warps=4)


def _descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    """Return the bulk copy engine's view of a matrix; a row after the last one reads as zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, STEP], step_layout())
