"""Choice of how a weight of any shape is multiplied: by the tile that a cost model finds cheapest, or by the library.

The matrix library multiplies where no tile is cheaper.

The model counts what a product waits for: memory, the latency of the steps in flight, what a warp issues and a
multiprocessor takes, and the last wave of programs, which fills the device in part. Its constants are fitted to two
sweeps on an H200 (`python -m benchmarks.kernels.fit`); nothing is timed at run time, so that the same weights give the
same bits on every start (docs/decisions/0014-tiles-by-cost.md).
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Literal, NamedTuple

from photon_grpc.kernels.linear.tiles import (
    SHARED_BYTES,
    TABLE,
    Problem,
    Tile,
    fits,
    holds_heads,
    num_steps,
    shared_bytes,
)

#: What a product is fused with: "normed" is "rotary" of normalised heads, "head" logits or the ids sampled from them.
End = Literal["rotary", "normed", "swiglu", "add", "head"]


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
    """W [n, k] times `rows` rows of x, its pairs `span` rows apart, and its epilogue."""

    n: int
    k: int
    rows: int
    span: int
    end: End


class TileConstants(NamedTuple):
    """Constants of tiles in microseconds, bytes and operations a microsecond; pairs are those of gemv and of wgmma.

    Of the device: memory. Of a multiprocessor: stream (W and x), matrix, squares (elements of x). Of a program: latency
    of what is in flight, step, refill (between one and the next in its place). Of a warp: issue. Of a launch: start,
    and what the ends rotary and swiglu add. merge, merge_bytes: of K shared out. rotate: a second kernel for heads.
    power: of the mean by which costs add up.
    """

    memory: float = 4.25e6
    stream: tuple[float, float] = (1.51e5, 1.83e5)
    matrix: tuple[float, float] = (3.0e6, 1.09e7)
    squares: float = 6.09e4
    latency: tuple[float, float] = (1.06, 1.17)
    step: tuple[float, float] = (0.28, 0.293)
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

    column: of K, or shared + shared_column where the library shares K out. start: a launch that overlaps neither the
    kernel before nor the one after.
    """

    memory: float = 3.9e6
    matrix: float = 2.7e9
    column: float = 0.00117
    shared: float = 2.26
    shared_column: float = 0.000354
    start: float = 4.72
    power: float = 1.47
    rotate: tuple[float, float] = (1.49, 1.91e6)
    swiglu: tuple[float, float] = (1.17, 1.7e6)
    head: tuple[float, float] = (1.07, 9.2e5)


TILES = TileConstants()
LIBRARY = LibraryConstants()


def tile_us(tile: Tile, product: Product, device: Device = H200, constants: TileConstants = TILES) -> float:
    """Return the microseconds of the product by this tile, its epilogue included."""
    c, kind = constants, tile.kind == "wgmma"
    n, k, rows, _, end = product
    has_norm = end not in ("add", "head")
    slices = tile.KW if tile.kind == "gemv" else 1
    programs = n // tile.BN * tile.SPLITS
    step_bytes = 2 * tile.BN * tile.BK * slices
    steps = num_steps(tile, k)
    program_bytes = step_bytes * steps
    each = max(
        c.latency[kind] / (step_bytes * min(steps, tile.NS - kind)),
        c.step[kind] / step_bytes,
        1 / (c.issue[kind] * tile.KW),
    )

    def us(active: int) -> float:
        """Return the microseconds of this many programs side by side."""
        # Of all that is done, the part of the multiprocessor that has most of it.
        most = ceil(active / device.num_multiprocessors) / active
        # Microseconds a byte of W, if nothing but this were waited for.
        costs = (
            1 / c.memory,
            each / active,
            most * (1 + rows / tile.BN) / c.stream[kind],
            most * rows / c.matrix[kind],
            most * rows * has_norm / (tile.BN * c.squares),
        )
        return active * program_bytes * sum(cost**c.power for cost in costs) ** (1 / c.power)

    at_once = resident(tile, product, device)
    slots = device.num_multiprocessors * at_once
    waves, rest = divmod(programs, slots)
    total = c.start[kind] + waves * us(slots) + (us(rest) if rest else 0.0)
    total += c.refill * max(0, ceil(programs / slots) - 1) / at_once
    total += {"rotary": c.rotary, "swiglu": c.swiglu}.get(end, 0.0)
    if tile.SPLITS > 1:
        total += c.merge + 8 * tile.SPLITS * rows * n / c.merge_bytes
    if end in ("rotary", "normed") and not _is_fused(tile, product):
        total += c.rotate
    return total


def resident(tile: Tile, product: Product, device: Device) -> int:
    """Return the programs that fit into a multiprocessor's shared memory and registers at a time."""
    rows, has_norm = product.rows, product.end not in ("add", "head")
    if tile.kind == "gemv":
        registers = 48 + 3 * tile.BN * rows // 32
    else:
        registers = 60 + (tile.BN * rows + has_norm * tile.BK * rows) // (32 * tile.KW)
    by_registers = 65_536 // (32 * tile.KW * min(255, registers))
    return max(1, min(device.shared_bytes // (shared_bytes(tile, rows) + 2048), by_registers))


def library_us(product: Product, constants: LibraryConstants = LIBRARY) -> float:
    """Return the microseconds of the product by the matrix library and of the kernel that its epilogue needs."""
    c, (n, k, rows, _, end) = constants, product
    costs = (
        2 * (n * k + rows * k) / c.memory,
        min(c.column * k, c.shared + c.shared_column * k),
        2 * n * k * rows / c.matrix,
    )
    second = {"rotary": c.rotate, "normed": c.rotate, "swiglu": c.swiglu, "head": c.head}.get(end)
    total = c.start + sum(cost**c.power for cost in costs) ** (1 / c.power)
    return total if second is None else total + second[0] + 2 * n * rows / second[1]


_SIXTEEN = tuple((16, *rest) for rest in ((64, 4, 8), (64, 4, 6), (64, 4, 4), (64, 8, 4), (64, 2, 8), (64, 2, 4)))
_LAST = ((16, 64, 1, 8), (16, 32, 1, 8))
#: Bucket -> (BN, BK, KW, NS) of what is considered: no size that was never near the best, and of equals the
#: first, with more in flight. One or two warps are for the shortest K, and for one that is no multiple of 64. Of more
#: rows the library is given every product that is not in the table.
GEMV = {
    8: (*_SIXTEEN, *_LAST),
    16: (*_SIXTEEN, (16, 128, 4, 4), (32, 64, 8, 4), (32, 128, 4, 4), (32, 64, 2, 4), (64, 64, 4, 4), *_LAST),
    32: (*_SIXTEEN, (32, 64, 4, 4), (32, 64, 4, 6), (32, 64, 2, 4), *_LAST),
}
WGMMA = {
    16: ((64, 128, 4, 6),),
    32: ((64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 6)),
    64: ((64, 128, 4, 6), (64, 64, 4, 4), (64, 64, 4, 6), (64, 64, 4, 8), (128, 64, 4, 4), (128, 128, 4, 4)),
}
MAX_SPLITS = 8
#: The library is faster at reading more bytes of W than this.
FAR_BYTES = 900_000_000


def candidates(product: Product, device: Device = H200) -> list[Tile]:
    """Return every tile that is considered and can multiply it."""
    n, k, rows, span, end = product
    problems = Problem(n, k, rows), Problem(n, k, rows, span)
    found = [
        tile
        for tile in _menu(rows, device.has_wgmma, may_share=end != "head")
        if fits(tile, problems[_is_fused(tile, product)], device.max_bytes)
    ]
    warps = max((tile.KW for tile in found), default=0)
    found = [tile for tile in found if min(4, warps) <= tile.KW]
    return [tile for tile in found if not _gathers(tile, product, device)] or found


def _gathers(tile: Tile, product: Product, device: Device) -> bool:
    """Return whether early programs may gather where the kernel before left room, leaving multiprocessors idle."""
    programs = product.n // tile.BN * tile.SPLITS
    return resident(tile, product, device) > ceil(programs / device.num_multiprocessors)


def _is_fused(tile: Tile, product: Product) -> bool:
    """Return whether the epilogue is in the product's own kernel."""
    return product.end == "swiglu" or (product.end == "rotary" and holds_heads(tile, product.span))


@cache
def _menu(rows: int, has_wgmma: bool, may_share: bool) -> tuple[Tile, ...]:
    gemv = [Tile("gemv", *sizes) for sizes in GEMV.get(rows, ())]
    split_counts = range(1, MAX_SPLITS + 1 if may_share else 2)
    wgmma = [Tile("wgmma", *sizes, splits) for sizes in WGMMA.get(rows, ()) for splits in split_counts]
    return (*gemv, *wgmma) if has_wgmma else tuple(gemv)


def choose(product: Product, device: Device = H200, *, may_decline: bool = True) -> Tile | None:
    """Return the tile that multiplies, from the table or the cheapest; None if the matrix library is as cheap.

    Args:
        product: `rows` is one of `tiles.BUCKETS`.
        may_decline: whether the library can take it. If it cannot, None means that no tile divides the product.
    """
    known = TABLE.get((product.n, product.k), {})
    if device.has_wgmma and product.end != "normed" and product.rows in known:
        tile = known[product.rows]
        if tile is None or fits(tile, Problem(*product[:4]), device.max_bytes):
            return tile
    best = min(candidates(product, device), key=lambda tile: tile_us(tile, product, device), default=None)
    if best is None or not may_decline:
        return best
    if 2 * product.n * product.k > FAR_BYTES:
        return None
    # The library was faster for no product of few rows, and the model is not that exact.
    return best if product.rows <= 32 or tile_us(best, product, device) < library_us(product) else None
