"""Products of 8-bit weights with many 8-bit rows: the bulk copy engine fetches, groups of four warps multiply (sm_90).

`products8.py` and `fused8.py` have the formulas, `epilogue.py` the ends. The bits are those of `wgmma8.py`.

A program takes tiles of 64 or 128 rows of W and 128 or 256 rows of x, one after the other. One warp fetches the columns
of a step into a ring of NS stages; two groups of four warps multiply 64 rows of every 128 of x each. While one group
adds the sums of 128 columns of e4m3 to its float32, scales int8, or ends a tile, the other has the tensor cores, and
the next tile arrives. Rows of x are the rows of a product: a thread has two of them and their scales, and of blocks of
W one scale, or two of pairs.

The two halves of a pair (`epilogue.tile_rows`) are eight rows apart in a tile: the engine copies them in that order.

Shapes: values int8 or e4m3 [T, K] and [N, K], N a multiple of 128 and K of 16; scales as in `products8.py`. bf16.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gdc_wait,
    gl,
    gluon_jit,
    has_dependent_launch,
    has_wgmma,
)
from photon_grpc.kernels.lang.jit import cdiv, compiled_once, num_multiprocessors
from photon_grpc.kernels.lang.ring import begin_ring
from photon_grpc.kernels.linear.boxes import descriptor, rows_descriptor
from photon_grpc.kernels.linear.epilogue import exchanged, tile_rows
from photon_grpc.kernels.linear.fused_linear import Fusion
from photon_grpc.kernels.linear.quantize import QuantizedRows, padded_rows
from photon_grpc.kernels.linear.tiles import Problem, Tile
from photon_grpc.kernels.linear.wide8_sums import (
    box_layout,
    float_sums,
    float_sums_of_two,
    integer_sums,
    num_x_tiles,
    place_of,
    produce,
    scale_layout,
    scales_of_w,
    sums_layout,
)

#: Columns of a step: those that e4m3 sums without rounding to float32, and that a scale covers.
STEP = 128
#: Rows of W, and of x in a group, that an end takes at a time; rows of W that divide W; rows of x of both groups.
GROUP_ROWS, ROWS, PART = 64, 128, 128


class TileSize(NamedTuple):
    """The size of a tile: parts of 128 rows of x, halves of 64 rows of W."""

    parts: int
    halves: int


class WideTile8(NamedTuple):
    """Constants that the kernel is compiled for: those of TileSize, NS stages, TURN steps of e4m3 that overlap.

    BLOCKS: whether blocks have scales. GROUP: of warps.
    """

    PARTS: int
    HALVES: int
    NS: int
    TURN: int
    BLOCKS: bool = False
    GROUP: int = 0


@constexpr_function
def of_second_group(tile: WideTile8) -> WideTile8:
    """Return the constants of the second group of warps."""
    return tile._replace(GROUP=1)


class Costs(NamedTuple):
    """Stages, and the microseconds of a step on an H200, without and with scales of blocks."""

    stages: int
    us: float
    blocks_us: float = math.inf


#: Registers do not hold two parts of x and scales.
SIZES = {TileSize(1, 2): Costs(6, 0.42, 0.47), TileSize(2, 2): Costs(4, 0.8), TileSize(1, 1): Costs(8, 0.34, 0.4)}
#: Steps of e4m3 that overlap, without and with scales of blocks: with them more is added between two products.
TURNS = 2, 4
#: Rows of W from which the kernel is faster than tiles of few rows with more than 64 rows of x.
MANY_TILES = 132 * ROWS
#: Rows of x that are multiplied at once: indices of results have 32 bits.
MAX_ROWS = 1 << 15
#: What was compiled in this process for every size.
_COMPILED: set[Any] = set()
#: What the ends and the groups of warps of a tile are compiled for.
TILE = Tile("wgmma", GROUP_ROWS, STEP, 4, 0)


@gluon_jit
def rescaled(acc, scales, place, num_rows, P: gl.constexpr, W: gl.constexpr):
    """Return the product [64, 64 · HALVES] in float32: the sums times the scales of rows that they have not met yet."""
    w_scale, x_scale = scales
    n_tile, first = place
    sums = acc.to(gl.float32)
    if not W.BLOCKS:
        out: gl.constexpr = sums_layout(W.HALVES)
        token = first + gl.arange(0, 64, layout=gl.SliceLayout(1, out))
        s_x = gl.load(x_scale + token, mask=token < num_rows, other=0.0)
        s_w = gl.load(w_scale + tile_rows(n_tile, 64 * W.HALVES, P.SPAN, gl.SliceLayout(0, out)))
        sums = sums * s_w[None, :] * s_x[:, None]
    return sums


@gluon_jit
def consume(
    scales, factors, result, ring,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, W: gl.constexpr, TILE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply and end 64 rows of every 128 of x: the program of one group of four warps."""
    if PDL:
        gdc_wait()
    y, operands, num_rows = result
    N_TILES: gl.constexpr = P.N // (64 * W.HALVES)
    PARTS: gl.constexpr = W.PARTS
    HALVES: gl.constexpr = W.HALVES
    x_tiles = num_x_tiles(num_rows, W)
    count = 0
    for number in range(gl.program_id(0), N_TILES * x_tiles, gl.num_programs(0)):
        n_tile, x_tile = place_of(number, x_tiles, N_TILES)
        of_w = (scales[0], n_tile)
        if ring[0].dtype == gl.int8:
            acc, more, count = integer_sums(ring, count, P, W)
        elif W.PARTS == 2:
            acc, more, count = float_sums_of_two(of_w, ring, count, P, W)
        else:
            acc, more, count = float_sums(of_w, ring, count, scales_of_w, P, W)
        for part in gl.static_range(PARTS):
            first = (x_tile * W.PARTS + part) * 128 + W.GROUP * 64
            sums = rescaled(acc if part == 0 else more, scales, (n_tile, first), num_rows, P, W)
            # An end takes 64 rows of W at a time.
            ended = halves_of(sums, W)
            for half in gl.static_range(HALVES):
                to = (y, operands, num_rows, (n_tile * W.HALVES + half, first))
                tile = exchanged(ended[half].permute([1, 0]), factors, to, P, TILE)
                STORE(tile, LOAD(to, P, TILE), to, P, TILE)


@gluon_jit
def halves_of(sums, W: gl.constexpr):
    """Return the sums [64, 64] of each half of the rows of W."""
    if W.HALVES == 2:
        return gl.split(sums.reshape([64, 2, 64]).permute([0, 2, 1]))
    else:
        return (sums,)


@gluon_jit
def wide8_kernel(
    w, w_scale, bias, x, x_scale, x_scales, y, num_rows, norms, operands,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply W by x and by their scales; persistent programs of four warps, and five more.

    w, x: descriptors of both. w_scale: float32 [N], with BLOCKS [K / 128, N / 128]. x_scale: float32 [>= num_rows],
    with BLOCKS x_scales is a descriptor of [K / 128, >= num_rows]. norms: float32 [num_rows], what the product is
    multiplied by after it is rounded, or None. LOAD and STORE are a pair of `epilogue.py`, `operands` what they take; P
    is a Problem with BM 64, W a WideTile8.
    """
    kind: gl.constexpr = w.dtype
    NS: gl.constexpr = W.NS
    ws = gl.allocate_shared_memory(kind, [W.NS * W.HALVES, 64, 128], box_layout(2))
    xs = gl.allocate_shared_memory(kind, [W.NS * W.PARTS * 2, 64, 128], box_layout(2))
    # Without scales in the ring nothing reads this.
    sxs = xs
    if W.BLOCKS:
        sxs = gl.allocate_shared_memory(gl.float32, [W.NS * W.PARTS, 1, 128], scale_layout())
    ready, free = begin_ring(NS, 2)
    ring = (ws, xs, sxs, ready, free)
    scales = (w_scale, x_scale)
    result = (y, operands, num_rows)
    second: gl.constexpr = of_second_group(W)
    gl.warp_specialize(
        [
            (consume, (scales, (norms, bias), result, ring, LOAD, STORE, P, W, TILE, PDL)),
            (consume, (scales, (norms, bias), result, ring, LOAD, STORE, P, second, TILE, PDL)),
            (produce, ((w, x, x_scales), ring, num_rows, P, W, PDL)),
        ],
        [4, 1],
        [240, 24],
    )


def takes(weight: torch.Tensor, num_rows: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel multiplies so many rows by values [N, K], with a result of this dtype."""
    n, k = weight.shape
    least = PART // 2 if n >= MANY_TILES else PART
    fits = n % ROWS == 0 and k % 16 == 0 and dtype == torch.bfloat16
    return fits and least < num_rows <= MAX_ROWS and has_wgmma(weight.device)


def holds_pairs(span: int) -> bool:
    """Return whether 64 rows of W have whole pairs at distance `span`, all of one head."""
    return span % (GROUP_ROWS // 2) == 0


@cache
def choose(num_rows: int, n: int, k: int, num_multiprocessors: int, *, has_blocks: bool = False) -> TileSize:
    """Return the tile that takes the least time."""

    def us(size: TileSize) -> float:
        waves = cdiv(num_tiles(size, num_rows, n), num_multiprocessors)
        return waves * cdiv(k, STEP) * (SIZES[size].blocks_us if has_blocks else SIZES[size].us)

    return min(SIZES, key=us)


def sizes(*, has_blocks: bool) -> list[TileSize]:
    """Return the tiles that are considered."""
    return [size for size in SIZES if not has_blocks or SIZES[size].blocks_us < math.inf]


def tile_of(size: TileSize, *, has_blocks: bool) -> WideTile8:
    return WideTile8(*size, SIZES[size].stages, TURNS[has_blocks], has_blocks)


def num_tiles(size: TileSize, num_rows: int, n: int) -> int:
    return n // (GROUP_ROWS * size.halves) * cdiv(num_rows, size.parts * PART)


def launch(
    fusion: Fusion, weight: tuple[torch.Tensor, torch.Tensor], rows: QuantizedRows, y: torch.Tensor,
    bias: torch.Tensor | None = None, *, size: TileSize | None = None,
) -> None:  # fmt: skip
    """Fill y from quantized rows, which have memory for whole parts.

    weight: values and scales. `bias` is that behind a norm, whose factors `rows` has. size: of a tile, None for the
    cheapest.
    """
    values, scales = weight
    (n, k), num_rows, has_blocks = values.shape, rows.values.shape[0], rows.scales.dim() == 2
    processors = num_multiprocessors(values.device)
    size = size or choose(num_rows, n, k, processors, has_blocks=has_blocks)
    pdl = has_dependent_launch(values.device)
    options = {"num_warps": TILE.KW, "launch_pdl": True} if pdl else {"num_warps": TILE.KW}
    # Copies that reach beyond a tensor are slow: they take rows of which there are none, too.
    padded = padded_rows(num_rows)
    of_w = rows_descriptor(values, (GROUP_ROWS, STEP), fusion.span, STEP)
    of_x = descriptor(_with_size(rows.values, padded, k), [PART, STEP], STEP)
    of_blocks = _with_size(rows.scales.t(), cdiv(k, STEP), padded) if has_blocks else None
    x_scales = None if of_blocks is None else descriptor(of_blocks, [1, PART], 0)
    problem = Problem(n, k, GROUP_ROWS, fusion.span, HEADS=fusion.heads)
    tensors = (
        of_w, scales, bias, of_x, None if has_blocks else rows.scales, x_scales,
        y, num_rows, rows.norms if fusion.eps is not None else None, fusion.operands, fusion.load, fusion.store,
    )  # fmt: skip

    def arguments(size: TileSize) -> tuple[Any, ...]:
        return (*tensors, problem, TILE, tile_of(size, has_blocks=has_blocks), pdl)

    # Steps of other sizes take the other tile.
    key = problem, fusion.store, values.dtype, has_blocks, bias is None
    compiled_once(wide8_kernel, _COMPILED, key, map(arguments, sizes(has_blocks=has_blocks)), **options)
    grid = (min(processors, num_tiles(size, num_rows, n)),)
    wide8_kernel[grid](*arguments(size), **options)


def _with_size(tensor: torch.Tensor, *size: int) -> torch.Tensor:
    """Return the tensor with the memory behind it."""
    return tensor.as_strided(size, tensor.stride())
