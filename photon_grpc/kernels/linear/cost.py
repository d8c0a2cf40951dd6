"""Choice of how a weight of any shape is multiplied: by the tile that a cost model finds cheapest, or by the library.

The matrix library multiplies where no tile is cheaper.

The model counts what a product waits for: memory, the latency of the steps in flight, what a warp issues and a
multiprocessor takes, and the last wave of programs, which fills the device in part. Its constants are fitted to two
sweeps on an H200 (`python -m benchmarks.kernels.fit`); nothing is timed at run time, so that the same weights give the
same bits on every start (docs/decisions/0014-tiles-by-cost.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil
from typing import NamedTuple

from photon_grpc.kernels.linear.tiles import (
    NORMED_TABLE,
    PACKED_TABLE,
    SHARED_BYTES,
    TABLE,
    Problem,
    Tile,
    fits,
    holds_heads,
    num_parts,
    num_steps,
    operand_registers,
    shared_bytes,
    step_bytes,
)
from photon_grpc.kernels.linear.weight import WeightKind
from photon_grpc.kernels.linear.wide_tiles import ROWS, fastest


class Device(NamedTuple):
    """The properties of a GPU that decide the choice; an H200 by default.

    shared_bytes: those of a multiprocessor. max_bytes: `tiles.pipeline_bytes` of a program.
    """

    num_multiprocessors: int = 132
    shared_bytes: int = 233_472
    max_bytes: int = SHARED_BYTES
    has_wgmma: bool = True


H200 = Device()


class Product(NamedTuple):
    """W [n, k], its K in `slices`, times `rows` rows of x, its pairs `span` rows apart; `epilogue`: a key of EPILOGUES.

    weight: how W is stored.
    """

    n: int
    k: int
    rows: int
    span: int
    epilogue: str
    slices: int = 1
    weight: WeightKind = WeightKind()

    def problem(self, span: int) -> Problem:
        return Problem(self.n, self.k, self.rows, span, SLICES=self.slices, WEIGHT=self.weight)


class TileConstants(NamedTuple):
    """Constants of tiles in microseconds, bytes and operations a microsecond; pairs are those of gemv and of wgmma.

    Of the device: memory. Of a multiprocessor: stream (W and x), matrix. Of a program: latency of what is in flight,
    step, chain (16 columns of it), refill (between one and the next in its place). Of a warp: issue. Of a launch:
    start, and what the ends rotary and swiglu add. merge, merge_bytes: of slices that programs share. rotate: a second
    kernel for heads. power: of the mean by which costs add up.
    """

    memory: float = 4.25e6
    stream: tuple[float, float] = (1.51e5, 1.83e5)
    matrix: tuple[float, float] = (3.0e6, 1.09e7)
    latency: tuple[float, float] = (1.06, 1.17)
    step: tuple[float, float] = (0.28, 0.293)
    chain: tuple[float, float] = (0.02, 0.02)
    issue: tuple[float, float] = (2.1e4, 1.46e4)
    start: tuple[float, float] = (1.86, 1.48)
    rotary: float = 1.11
    swiglu: float = 1.71
    refill: float = 0.97
    merge: float = 0.61
    merge_bytes: float = 9.96e5
    rotate: float = 3.69
    power: float = 2.5


class LibraryConstants(NamedTuple):
    """Constants of the library in microseconds, bytes and operations a microsecond.

    They are those of the product, and of the kernel after it by its epilogue.

    column: of a slice of K. added: the addition of slices to the residual. start: a launch that overlaps neither the
    kernel before nor the one after.
    """

    memory: float = 3.9e6
    matrix: float = 2.7e9
    column: float = 0.00117
    start: float = 4.72
    power: float = 1.47
    rotate: tuple[float, float] = (1.49, 1.91e6)
    swiglu: tuple[float, float] = (1.17, 1.7e6)
    head: tuple[float, float] = (1.07, 9.2e5)
    added: tuple[float, float] = (1.5, 1.0e6)


TILES = TileConstants()
#: Of packed weights: those of wgmma are fitted to `packed_sweep` at 16 to 128 rows.
PACKED_TILES = TILES._replace(step=(0.28, 0.15), latency=(1.06, 0.8), issue=(2.1e4, 2.4e4))
LIBRARY = LibraryConstants()


class EpilogueCost(NamedTuple):
    """The cost of an epilogue by the names of constants; "" costs nothing.

    in_tile: of TileConstants, for the epilogue in our kernel. behind: of LibraryConstants, for the kernel that follows
    the library's product. holds: whether a tile of pairs `span` apart has the epilogue in its own kernel; else `rotate`
    follows. most_rows: of W in a tile; with more, registers spill.
    """

    in_tile: str = ""
    behind: str = ""
    holds: Callable[[Tile, int], bool] = lambda tile, span: True
    most_rows: int = 256


EPILOGUES = {
    "rotary": EpilogueCost("rotary", "rotate", holds_heads),
    # Rotary of normalised heads.
    "normed": EpilogueCost("", "rotate", lambda tile, span: False),
    "swiglu": EpilogueCost("swiglu", "swiglu"),
    "add": EpilogueCost(),
    # Logits, or the ids sampled from them.
    "head": EpilogueCost("", "head", most_rows=128),
}


#: Bits -> what a warp issues for a byte of W, as a multiple of what it issues for a byte of 16-bit numbers.
ISSUED = {16: 1.0, 8: 2.0, 4: 2.0}


def tile_us(tile: Tile, product: Product, device: Device = H200, constants: TileConstants | None = None) -> float:
    """Return the microseconds of the product by this tile, its epilogue included."""
    kind = tile.kind == "wgmma"
    n, k, rows, span, epilogue, slices, weight = product
    c = constants or (TILES if weight.BITS == 16 else PACKED_TILES)
    programs = num_programs(tile, product)
    in_step = step_bytes(tile, weight, k, slices) * (slices if tile.kind == "gemv" else 1)
    # Numbers, and what is done with them, for each that 16 bits hold.
    packed, issued = 16 / weight.BITS, ISSUED[weight.BITS]
    if not kind and weight.BITS == 16:
        # A warp of gemv multiplies 16 rows of x in the time in which it loads W; fitted at 32 rows in layers.
        issued *= max(1, rows // 16)
    steps = num_steps(tile, k, slices)
    program_bytes = in_step * steps
    each = max(
        c.latency[kind] / (in_step * min(steps, tile.NS - kind)),
        max(c.step[kind], c.chain[kind] * tile.BK / 16) / in_step,
        issued / (c.issue[kind] * tile.KW),
    )

    def us(active: int) -> float:
        """Return the microseconds of this many programs side by side."""
        # Of all that is done, the part of the multiprocessor that has most of it.
        most = ceil(active / device.num_multiprocessors) / active
        # Microseconds a byte of W, if nothing but this were waited for.
        costs = (
            1 / c.memory,
            each / active,
            most * (1 + packed * rows / tile.BN) / c.stream[kind],
            most * packed * rows / c.matrix[kind],
        )
        return active * program_bytes * sum(cost**c.power for cost in costs) ** (1 / c.power)

    at_once = resident(tile, product, device)
    slots = device.num_multiprocessors * at_once
    waves, rest = divmod(programs, slots)
    total = c.start[kind] + waves * us(slots) + (us(rest) if rest else 0.0)
    total += c.refill * max(0, ceil(programs / slots) - 1) / at_once
    in_tile, _, holds, _ = EPILOGUES[epilogue]
    total += getattr(c, in_tile) if in_tile else 0.0
    if kind and slices > 1:
        total += c.merge + 8 * slices * rows * n / c.merge_bytes
    return total if holds(tile, span) else total + c.rotate


def resident(tile: Tile, product: Product, device: Device) -> int:
    """Return the programs that fit into a multiprocessor's shared memory and registers at a time."""
    rows, slices = product.rows, product.slices
    if tile.kind == "gemv":
        step = operand_registers(tile.BN, tile.BK, rows, tile.KW // slices)
        parts = num_parts(tile.BK, step, product.span > 0)
        registers = 60 + tile.BN * rows * slices // (32 * tile.KW) + 2 * step // parts
    else:
        registers = 60 + tile.BN * rows // (32 * tile.KW)
    by_registers = 65_536 // (32 * tile.KW * min(255, registers))
    return max(1, min(device.shared_bytes // (shared_bytes(tile, product.problem(0)) + 2048), by_registers))


#: Bits of W -> bucket -> how much longer than the model says a product with SwiGLU took.
DECODED = {8: {64: 1.38, 128: 1.57}, 4: {64: 1.72, 128: 1.78}}
#: How much longer than the model says a product of 128 rows with an epilogue of `BY_WIDE` takes in a tile of few rows:
#: with one slice of K, with several. Compared with what `wide.py` takes, the norms of rows of x included.
AT_128_ROWS = 1.5, 1.25
BY_WIDE = ("rotary", "normed", "add")
#: Microseconds of the kernel that makes the norms of rows of x for `wide.py`.
NORMS_US = 3.0


def library_us(product: Product, constants: LibraryConstants = LIBRARY) -> float:
    """Return the microseconds of the product by the matrix library and of the kernel that its epilogue needs."""
    c, (n, k, rows, _, epilogue, slices, weight) = constants, product
    costs = (
        2 * (n * k + rows * k) / c.memory,
        c.column * k / slices,
        2 * n * k * rows / c.matrix,
    )
    behind = EPILOGUES[epilogue].behind
    second = getattr(c, behind) if behind else None
    total = c.start + sum(cost**c.power for cost in costs) ** (1 / c.power)
    if weight.BITS < 16:
        # A kernel reads the packed weight and writes the one that the library reads.
        total += c.start + (2 + weight.BITS / 8) * n * k / c.memory
    if slices > 1:
        second = second or c.added
    return total if second is None else total + second[0] + 2 * n * rows / second[1]


_NARROW = ((16, 64, 1), (16, 128, 1), (16, 256, 1))
#: Bucket -> (BN, BK, warps of a slice) of what is considered, with as many steps as have these bytes together.
GEMV = {
    8: (
        *_NARROW,
        (32, 64, 2),
        (32, 128, 1),
        (32, 128, 2),
        (32, 256, 1),
        (32, 256, 2),
        (64, 256, 2),
    ),
    16: (
        *_NARROW,
        (32, 64, 2),
        (32, 128, 2),
        (32, 256, 1),
        (32, 256, 2),
        (64, 128, 2),
        (64, 128, 4),
    ),
    32: (*_NARROW, (32, 128, 2), (64, 128, 2)),
}
IN_FLIGHT = (64 << 10, 96 << 10, 128 << 10, 176 << 10)
#: Bucket -> (BN, BK, KW, NS). Of more rows the library is given every product that is not in the table.
WGMMA = {
    16: ((64, 128, 4, 8), (64, 64, 4, 10), (128, 64, 4, 6)),
    32: ((64, 128, 4, 8), (64, 64, 4, 8), (128, 64, 8, 8), (32, 128, 4, 8)),
    64: ((64, 128, 4, 6), (64, 64, 4, 8), (64, 64, 4, 10), (128, 64, 8, 8), (32, 128, 4, 8)),
}
#: The same of packed weights, of which a program with few rows would read less than of x.
PACKED_GEMV = {
    8: (
        (16, 64, 1),
        (16, 256, 1),
        (32, 64, 2),
        (32, 128, 1),
        (32, 128, 2),
        (32, 256, 1),
        (32, 256, 2),
        (64, 128, 2),
        (64, 128, 4),
        (64, 256, 2),
        (64, 256, 4),
    ),
    16: (
        (16, 64, 1),
        (16, 256, 1),
        (32, 64, 2),
        (32, 128, 2),
        (32, 256, 2),
        (64, 128, 2),
        (64, 128, 4),
        (64, 256, 4),
    ),
    32: ((16, 64, 1), (16, 128, 1), (32, 64, 2), (32, 128, 2), (64, 128, 2), (64, 128, 4)),
}
#: More of 4 bits at 8 rows, and fewer bytes: all programs side by side, and steps that take longer than a barrier.
OF_4_BITS = (64, 512, 4), (32, 512, 2), (128, 256, 8)
OF_4_BITS_IN_FLIGHT = (40 << 10, 48 << 10, *IN_FLIGHT)
#: Of those that cost the same the first is taken. More rows of W read fewer of x.
PACKED_WGMMA = {
    16: ((64, 256, 4, 6), (64, 128, 4, 8), (64, 128, 4, 12), (64, 64, 4, 12), (128, 256, 8, 4)),
    32: ((64, 128, 4, 8), (64, 128, 4, 12), (64, 256, 4, 6), (64, 64, 4, 12), (128, 128, 8, 6), (128, 256, 8, 4)),
    64: (
        *((64, 128, 4, 8), (64, 256, 4, 4), (64, 128, 4, 6), (64, 128, 4, 5), (64, 64, 4, 10)),
        *((128, 128, 8, 6), (128, 256, 8, 4), (128, 64, 8, 8), (128, 128, 8, 4)),
        *((256, 128, 8, 6), (256, 128, 16, 4)),
    ),
    128: ((64, 128, 4, 5), (64, 64, 4, 8), (128, 64, 8, 8), (128, 128, 8, 4), (256, 64, 8, 6)),
}


def candidates(product: Product, device: Device = H200) -> list[Tile]:
    """Return every tile that is considered and can multiply it."""
    problems, epilogue = (product.problem(0), product.problem(product.span)), EPILOGUES[product.epilogue]
    found = [
        tile
        for tile in _menu(product.rows, product.slices, product.weight.BITS, device.has_wgmma)
        if epilogue.most_rows >= tile.BN and fits(tile, problems[epilogue.holds(tile, product.span)], device.max_bytes)
    ]
    return [tile for tile in found if not _gathers(tile, product, device)] or found


def _gathers(tile: Tile, product: Product, device: Device) -> bool:
    """Return whether early programs may gather where the kernel before left room, leaving multiprocessors idle."""
    return resident(tile, product, device) > ceil(num_programs(tile, product) / device.num_multiprocessors)


def num_programs(tile: Tile, product: Product) -> int:
    return product.n // tile.BN * (1 if tile.kind == "gemv" else product.slices)


@cache
def _menu(rows: int, slices: int, bits: int, has_wgmma: bool) -> tuple[Tile, ...]:
    of_gemv, of_wgmma, most = (GEMV, WGMMA, 16) if bits == 16 else (PACKED_GEMV, PACKED_WGMMA, 24)
    sizes, bytes_in_flight = of_gemv.get(rows, ()), IN_FLIGHT
    if (rows, bits) == (8, 4):
        sizes, bytes_in_flight = sizes + OF_4_BITS, OF_4_BITS_IN_FLIGHT
    gemv = [
        Tile("gemv", bn, bk, warps * slices, min(most, in_flight // (slices * bk * (bn * bits // 8 + 2 * rows))))
        for bn, bk, warps in sizes
        for in_flight in bytes_in_flight
    ]
    wgmma = [Tile("wgmma", *sizes) for sizes in of_wgmma.get(rows, ())]
    found = dict.fromkeys((*gemv, *wgmma) if has_wgmma else gemv)
    return tuple(tile for tile in found if tile.NS >= 2)


def choose(product: Product, device: Device = H200, *, may_decline: bool = True) -> Tile | None:
    """Return the tile that multiplies, from the table or the cheapest; None if the matrix library is as cheap.

    Args:
        product: `rows` is one of `tiles.BUCKETS`.
        may_decline: whether the library, or `wide.py` for packed weights, can take it. If it cannot, None means that no
            tile divides the product.
    """
    n, k, bits = product.n, product.k, product.weight.BITS
    of_16_bits = NORMED_TABLE if product.epilogue == "normed" else TABLE
    known = of_16_bits.get((n, k), {}) if bits == 16 else PACKED_TABLE.get((n, k, bits), {})
    is_timed = device.has_wgmma and (bits == 16 or product.epilogue != "normed")
    if is_timed and product.rows in known:
        tile = known[product.rows]
        if tile is None or fits(tile, product.problem(product.span), device.max_bytes):
            return tile
    # Of packed weights more warps decode faster than the model knows: measured where it finds tiles alike.
    best = min(
        candidates(product, device),
        key=lambda tile: (tile_us(tile, product, device), -tile.KW if bits < 16 else 0),
        default=None,
    )
    if best is None or not may_decline:
        return best
    # The library was faster for no product of few rows, and the model is not that exact.
    if product.rows <= 32:
        return best
    us = tile_us(best, product, device)
    if bits < 16 and device.has_wgmma and n % ROWS == 0:
        of_wide = fastest(product.rows, n, k, product.slices, bits, device.num_multiprocessors)[0]
        if product.epilogue == "swiglu" and n // ROWS > device.num_multiprocessors:
            return best if DECODED[bits][product.rows] * us < of_wide + NORMS_US else None
        if product.epilogue in BY_WIDE and product.rows == 128:
            return best if AT_128_ROWS[product.slices > 1] * us < of_wide else None
    return best if us < library_us(product) else None
