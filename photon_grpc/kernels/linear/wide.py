"""Products of packed weights with many rows of x (sm_90).

With more rows than `fused_linear.py` takes, and with 33 or more where W has more tiles than there are multiprocessors.
`fused_linear.py` has the formulas, `epilogue.py` the ends. The bits are those of `wgmma.py`, and of the matrix library
with the dequantized weight.

A program takes tiles of 128 rows of W and 64 to 256 rows of x, one after the other, as in `wide8.py`: one warp fetches
steps of 64 columns into a ring, two groups of four warps decode 64 rows of W each in registers and multiply. Where
tiles do not fill the last wave of programs, sums are handed on (`handed.py`). Slices of K are added in registers, or
are tiles of their own, whose sums another kernel adds: where there are few tiles, more multiprocessors are busy so. Of
several slices each group may have half, of the same 64 rows of W: the second gives its sums to the first by way of
shared memory, slice by slice.

Shapes: x [T, K] contiguous, W as of an arranged QuantizedWeight, N a multiple of 128. bf16 and fp16; ends in bf16.
Operations: 2 · T · N · K. Bytes moved: N · K · bits / 8, from the second-level cache x once for 128 rows of W.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.gluon import (
    fence_async_shared,
    gdc_wait,
    gl,
    gluon_jit,
    has_dependent_launch,
    has_wgmma,
    mbarrier,
)
from photon_grpc.kernels.lang.jit import compiled_once, counters_of, num_multiprocessors
from photon_grpc.kernels.linear import epilogue
from photon_grpc.kernels.linear.boxes import box_layout, descriptor, rows_descriptor
from photon_grpc.kernels.linear.epilogue import exchanged
from photon_grpc.kernels.linear.fused_linear import Affine, Fusion
from photon_grpc.kernels.linear.handed import hand_on, job_of, num_jobs, take_over
from photon_grpc.kernels.linear.tiles import Problem, Tile, num_pieces, stored_width, with_rows
from photon_grpc.kernels.linear.weight import QuantizedWeight
from photon_grpc.kernels.linear.wide8_sums import place_of
from photon_grpc.kernels.linear.wide_sums import (
    add_given,
    flat_layout,
    give,
    given_layout,
    multiply_steps,
    no_sums,
    num_blocks,
    produce,
    rows_at_once,
    sides_at_once,
    sums_of,
    whole_sums,
    x_box,
)
from photon_grpc.kernels.linear.wide_tiles import (
    GROUP_ROWS,
    ROWS,
    STEP,
    WideTile,
    chosen_tiles,
    fastest,
    num_slice_steps,
    num_tiles,
)

#: Rows of x that are multiplied at once: indices of results have 32 bits.
MAX_ROWS = 1 << 15
#: What the ends and the groups of warps of a tile are compiled for.
TILE = Tile("wgmma", GROUP_ROWS, STEP, 4, 0)
#: What was compiled in this process for every size.
_COMPILED: set[Any] = set()
PLAIN = Fusion(epilogue.load_nothing, epilogue.store_sums)


@gluon_jit
def consume(
    factors, result, ring, given, handed, x_tiles,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, W: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Multiply and end 64 rows of W of every tile: the program of one group of four warps.

    given: where the second group leaves its slices, which the first adds to its own and ends; as of `add_given`.
    handed: where a program leaves the sums of the first steps of a tile, as of `take_over`.
    """
    y, operands, num_rows = result
    N_TILES: gl.constexpr = P.N // (64 if W.IS_SHARED else 128)
    PARTS: gl.constexpr = P.SLICES if W.IS_SPLIT else 1
    #: Slices that a group gives or is given, and those that it adds up by itself.
    HALF: gl.constexpr = P.SLICES // 2 if W.IS_SHARED else 1
    ADDED: gl.constexpr = HALF if W.IS_SHARED and GROUP == 0 else 1 if W.IS_SPLIT or W.IS_SHARED else P.SLICES
    FIRST: gl.constexpr = num_slice_steps(P.K, P.SLICES, 0)
    LAST: gl.constexpr = num_slice_steps(P.K, P.SLICES, P.SLICES - 1)
    if PDL:
        gdc_wait()
    count = 0
    BLOCKS: gl.constexpr = num_blocks(P.K, W.IS_HANDED)
    num_tiles = N_TILES * x_tiles * PARTS
    for job in range(num_jobs(num_tiles, BLOCKS, W.IS_HANDED)):
        number, begin, end = job_of(job, num_tiles, BLOCKS, W.IS_HANDED)
        n_tile, x_tile = place_of(number // PARTS, x_tiles, N_TILES)
        part = number % PARTS
        is_whole = True
        if W.IS_HANDED:
            sums, rest = no_sums(W)
            sums, rest = take_over(handed, GROUP, begin > 0, sums, rest, W.MORE > 0)
            steps = (end - begin) * (FIRST // BLOCKS)
            sums, rest, count = multiply_steps((sums, rest), (ring, count), steps, P, W, GROUP)
            is_whole = end == BLOCKS
            if not is_whole:
                hand_on(handed, GROUP, sums, rest, W.MORE > 0)
            sums, rest = whole_sums((sums, rest), ring, P, W)
        elif FIRST == LAST:
            sums, rest, count = sums_of(ring, count, FIRST, P, W, GROUP)
        else:
            sums, rest, count = sums_of(ring, count, gl.where(part == P.SLICES - 1, LAST, FIRST), P, W, GROUP)
        for added in range(1, ADDED):
            more, _, count = sums_of(ring, count, gl.where(added == P.SLICES - 1, LAST, FIRST), P, W, GROUP)
            sums = sums + more
        of_part = y + part.to(gl.int64) * num_rows * P.N
        program = n_tile if W.IS_SHARED else n_tile * 2 + GROUP
        token = x_tile * (W.BM + W.MORE)
        to = (of_part, operands, num_rows, (program, token))
        if W.IS_SHARED and GROUP == 1:
            give(sums, given, count // FIRST)
            for _ in gl.static_range(1, HALF):
                sums, _, count = sums_of(ring, count, FIRST, P, W, GROUP)
                give(sums, given, count // FIRST)
        elif is_whole:
            if W.IS_SHARED:
                for received in gl.static_range(HALF):
                    sums = add_given(sums, given, count // FIRST - HALF + 1 + received)
            STORE(exchanged(sums, factors, to, P, TILE), LOAD(to, P, TILE), to, P, TILE)
            if W.MORE:
                # The rows of x that are multiplied apart.
                OF_MORE: gl.constexpr = with_rows(P, W.MORE)
                to = (of_part, operands, num_rows, (program, token + W.BM))
                STORE(exchanged(rest, factors, to, OF_MORE, TILE), LOAD(to, OF_MORE, TILE), to, OF_MORE, TILE)


@gluon_jit
def wide_kernel(
    w, scales, zeros, norm, bias, x, whole_x, y, num_rows, norms, operands, handed,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply packed W by x; persistent programs of four warps, and five more.

    w, scales, zeros, norm, x: descriptors, zeros and norm as P.WEIGHT says. norms: float32 [num_rows], what the product
    is multiplied by after it is rounded, or None. y: of IS_SPLIT the sums [SLICES, num_rows, N]. LOAD and STORE are a
    pair of `epilogue.py`, `operands` what they take; P is a Problem with the rows of x of an end, W a WideTile. handed:
    memory and counters of `handed.py`, or None.
    """
    NS: gl.constexpr = W.NS
    BM: gl.constexpr = W.BM
    kind: gl.constexpr = x.dtype
    WIDTH: gl.constexpr = stored_width(P.WEIGHT.BITS, 64)
    G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, 64, P.K, P.SLICES)
    ws = gl.allocate_shared_memory(w.dtype, [NS * 2, 64, WIDTH], box_layout(2, 8, WIDTH))
    XS: gl.constexpr = 2 if W.IS_SHARED else 1
    xs = gl.allocate_shared_memory(kind, [NS * XS, BM, 64], box_layout(2, 16, 128))
    MORE: gl.constexpr = W.MORE
    more = xs
    if MORE:
        more = gl.allocate_shared_memory(kind, [NS, MORE, 64], box_layout(2, 16, 128))
    of_scales = gl.allocate_shared_memory(kind, [NS * 2, 1, G, 64], flat_layout())
    # Without zeros or a norm nothing reads these.
    of_zeros = of_scales
    of_norm = of_scales
    if P.WEIGHT.HAS_ZEROS:
        of_zeros = gl.allocate_shared_memory(kind, [NS * 2, 1, G, 64], flat_layout())
    if P.WEIGHT.HAS_NORM:
        of_norm = gl.allocate_shared_memory(kind, [NS * XS, 1, 1, 64], flat_layout())
    ready = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [NS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NS):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    if W.IS_SHARED:
        of_given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for number in gl.static_range(2):
            mbarrier.init(of_given.index(number), count=1)
    fence_async_shared()
    x_tiles = (num_rows + W.BM + W.MORE - 1) // (W.BM + W.MORE)
    ring = (ws, (xs, more), of_scales, of_zeros, of_norm, ready, free)
    result = (y, operands, num_rows)
    given = ring
    if W.IS_SHARED:
        given = (gl.allocate_shared_memory(gl.float32, [64, BM], given_layout()), of_given.index(0), of_given.index(1))
    gl.warp_specialize(
        [
            (consume, ((norms, bias), result, ring, given, handed, x_tiles, LOAD, STORE, P, W, TILE, PDL, 0)),
            (consume, ((norms, bias), result, ring, given, handed, x_tiles, LOAD, STORE, P, W, TILE, PDL, 1)),
            (produce, ((w, (x, whole_x), scales, zeros, norm), ring, (num_rows, x_tiles), P, W, PDL)),
        ],
        [4, 1],
        [232, 40],
    )


def choose(x: torch.Tensor, linear: Affine) -> WideTile | None:
    """Return how to multiply; None if the matrix library is faster with a written W, or no tile can."""
    w = linear.w
    if not isinstance(w, QuantizedWeight) or not w.is_arranged or not has_wgmma(x.device):
        return None
    fits = 0 < x.shape[0] <= MAX_ROWS and w.shape[0] % ROWS == 0 and x.is_contiguous()
    sizes = x.shape[0], *w.shape, linear.slices, w.kind.BITS, num_multiprocessors(x.device)
    return fastest(*sizes)[1] if fits else None


def sums(x: torch.Tensor, linear: Affine, tile: WideTile) -> torch.Tensor:
    """Return the sums of the slices of K, float32 [slices, T, N], or of all of them, float32 [1, T, N]."""
    shape = linear.slices if tile.IS_SPLIT else 1, x.shape[0], linear.w.shape[0]
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    launch(PLAIN, x, linear, y, tile)
    return y


def launch(
    fusion: Fusion, x: torch.Tensor, linear: Affine, y: torch.Tensor, tile: WideTile,
    norms: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill y; of a tile that is split the sums [slices, T, N]. `norms` are needed with a norm (squares.norms)."""
    w, (num_rows, k), device = linear.w, x.shape, x.device
    assert isinstance(w, QuantizedWeight)
    n, kind, span = w.shape[0], linear.kind, fusion.span
    pdl = has_dependent_launch(device)
    options = {"num_warps": TILE.KW, "launch_pdl": True} if pdl else {"num_warps": TILE.KW}
    groups = num_pieces(kind.GROUP, STEP, k, linear.slices)
    of_norm = None if w.norm is None else descriptor(w.norm.view(1, -1), [1, STEP], 0)
    bias = linear.b if norms is not None else None

    programs = num_multiprocessors(device)
    counters, width = counters_of(w.values, 2 * programs), stored_width(kind.BITS, STEP)

    def arguments(tile: WideTile) -> tuple[Any, ...]:
        of_w = rows_descriptor(w.values, (rows_at_once(span, tile.IS_SHARED), width), span, width)
        at_once = sides_at_once(span, tile.IS_SHARED, groups)
        both = w.scales, w.zeros
        sides = [None if side is None else sides_descriptor(side, groups, span, at_once) for side in both]
        of_x = [descriptor(x, [rows, STEP], 128) for rows in (x_box(), tile.BM)]
        problem = Problem(n, k, tile.BM, span, HEADS=fusion.heads, SLICES=linear.slices, WEIGHT=kind)
        handed = None
        if tile.IS_HANDED:
            size = 2 * programs * GROUP_ROWS * tile.rows
            handed = torch.empty(size, dtype=torch.float32, device=device), counters
        tensors = of_w, *sides, of_norm, bias, *of_x, y, num_rows, norms, fusion.operands, handed
        return (*tensors, fusion.load, fusion.store, problem, TILE, tile, pdl)

    # Steps of other sizes take other tiles.
    found = chosen_tiles(n, k, linear.slices, kind.BITS, programs, MAX_ROWS)
    others = [one for one in found if one.IS_SPLIT == tile.IS_SPLIT]
    key = n, k, span, fusion.heads, linear.slices, kind, fusion.store, x.dtype, y.dtype, bias is None, tile.IS_SPLIT
    compiled_once(wide_kernel, _COMPILED, key, map(arguments, others), **options)
    grid = (min(programs, num_tiles(tile, num_rows, n, linear.slices)),)
    wide_kernel[grid](*arguments(tile), **options)


def sides_descriptor(sides: torch.Tensor, groups: int, span: int, rows: int) -> Any:
    """Return the engine's view of scales or zeros [groups of columns, N], rows in the order of `rows_descriptor`."""
    if not span:
        return descriptor(sides, [groups, rows], 0)
    count, n = sides.shape
    pairs = sides.view(count, n // (2 * span), 2, span // 8, 8).transpose(2, 3)
    return descriptor(pairs, [groups, 1, rows // 16, 2, 8], 0)
