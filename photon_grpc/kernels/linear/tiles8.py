"""Ways to multiply a weight of 8 bits with 8-bit rows: which tile of `wgmma8.py`, or the matrix library.

A step of 2 · BK columns in 8 bits has the bytes, the products and the time of one of BK columns in 16 bits; so the
model of cost (`cost.py`) is asked for a weight of half the columns. Nothing is timed at run time.

int8 sums are exact: K may be cut into slices by what is fastest. fp8 sums are not, and K is never cut.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from photon_grpc.kernels.linear import cost
from photon_grpc.kernels.linear.cost import H200, Device, Product
from photon_grpc.kernels.linear.quantize import ROWS
from photon_grpc.kernels.linear.tiles import SHARED_BYTES, Problem, Tile
from photon_grpc.kernels.linear.wgmma8 import x_rows

#: (BN, BK, warps) of tiles for so many rows of x: of blocks, of int8, and of e4m3 with a scale of a row, whose sums are
#: added between two products: with 64 rows of x and 128 of W nothing is multiplied meanwhile.
_OF_64 = (64, 128, 4), (64, 256, 4)
_OF_32 = (32, 256, 4), *_OF_64
_OF_128 = ((128, 128, 8),)
_MANY = (64, 128, 4), *_OF_128
BLOCK_MENU = {8: _OF_64, 16: (*_OF_64, *_OF_128), **dict.fromkeys((32, 64), (*_OF_32, *_OF_128)), 128: _MANY}
MENU = {8: _OF_32, **dict.fromkeys((16, 32, 64), (*_OF_32, *_OF_128)), 128: _MANY}
FLOAT_MENU = {**dict.fromkeys((8, 16, 32, 64), _OF_32), 128: _MANY}
IN_FLIGHT = (*cost.IN_FLIGHT, 192 << 10)
#: Microseconds from the end of the kernel before to rounded rows; of a slice that is merged, beside what 16 bits take.
ROUNDING_US, MERGING_US = 3.0, 1.5
#: Microseconds of adding the sums of 128 columns of e4m3 and 64 rows of W.
ADDING_US = 0.02
#: Slices of K that are considered, of int8 only; sums of a thread that can be merged.
SLICES, MERGED = (1, 2, 4), 64


class Way(NamedTuple):
    """A tile of `wgmma8.py` for so many rows, and the slices of K that programs share."""

    tile: Tile
    rows: int
    slices: int = 1


class Weights(NamedTuple):
    """The kind of a weight: int8 or e4m3, with a scale of each row or of each 128 x 128 numbers."""

    is_int: bool
    has_blocks: bool = False


def bucket(num_rows: int) -> int | None:
    """Return the smallest of ROWS that holds num_rows; None above them all."""
    return next((size for size in ROWS if size >= num_rows), None)


def shared_bytes(tile: Tile, rows: int, weights: Weights) -> int:
    """Return the bytes of the steps in flight and of their scales."""
    of_x = x_rows(tile.BN, rows)
    scales = 4 * (of_x + 16) * (tile.BK // 128) if weights.has_blocks else 0
    return tile.NS * (tile.BK * (tile.BN + of_x) + scales)


def fits(way: Way, problem: Problem, weights: Weights, max_bytes: int = SHARED_BYTES) -> bool:
    """Return whether a tile divides the problem's W and pairs, and fits into shared memory."""
    tile, rows, slices = way
    n, k, _, span = problem[:4]
    # Rows are copied 16 bytes at a time.
    divides = n % tile.BN == 0 and k % 16 == 0 and (span == 0 or span % (tile.BN // 2) == 0)
    # The compiler of Triton 3.6 fails on a loop of a single step; every slice has something to multiply.
    steps = -(-k // (tile.BK * slices))
    has_steps = steps >= 2 and steps * tile.BK * (slices - 1) < k
    # Merging reads the sums of a slice beside those of another: both must fit into registers.
    merges = slices == 1 or tile.BN * rows <= MERGED * 32 * tile.KW
    # The ring is two places longer than what is in flight before the first step.
    has_room = tile.NS >= 3 and shared_bytes(tile, rows, weights) <= max_bytes
    return divides and has_steps and merges and has_room


def candidates(product: Product, weights: Weights, device: Device = H200) -> list[Way]:
    """Return every way that is considered and can multiply it; the product's own slices do not matter.

    Where it can be helped, no multiprocessor has room for more programs than its share: they start before the kernel
    that quantizes ends, and the more steps each has in flight, the more of W arrives meanwhile.
    """
    rows = product.rows
    menu = BLOCK_MENU if weights.has_blocks else MENU if weights.is_int else FLOAT_MENU
    found = [
        Way(Tile("wgmma", bn, bk, warps, min(16, in_flight // (bk * (bn + x_rows(bn, rows))))), rows, slices)
        for bn, bk, warps in menu.get(rows, ())
        for in_flight in IN_FLIGHT
        for slices in (SLICES if weights.is_int else (1,))
    ]
    problem = Problem(product.n, product.k, rows, product.span if product.epilogue == "swiglu" else 0)
    found = [way for way in dict.fromkeys(found) if fits(way, problem, weights, device.max_bytes)]
    return [way for way in found if not _gathers(way, product, device)] or found


def _gathers(way: Way, product: Product, device: Device) -> bool:
    """Return whether early programs may gather on some multiprocessors and leave others idle."""
    tile, halved = _halved(way, product)
    share = -(-cost.num_programs(tile, halved) // device.num_multiprocessors)
    return cost.resident(tile, halved, device) > share


def _halved(way: Way, product: Product) -> tuple[Tile, Product]:
    """Return the tile and the product of 16 bits that have the bytes of these of 8."""
    return way.tile._replace(BK=way.tile.BK // 2), product._replace(k=product.k // 2, slices=way.slices)


def way_us(way: Way, product: Product, device: Device = H200, *, is_int: bool = True) -> float:
    """Return the microseconds of the product by this way behind the kernel that rounds x, its epilogue included."""
    tile, halved = _halved(way, product)
    programs = min(cost.num_programs(tile, halved), device.num_multiprocessors * cost.resident(tile, halved, device))
    # What programs ask for before x is rounded arrives meanwhile.
    steps = min(tile.NS - 2, -(-halved.k // (tile.BK * way.slices)))
    ahead = programs * steps * way.tile.BN * way.tile.BK
    waiting = max(0.0, ROUNDING_US - ahead / cost.TILES.memory)
    adding = 0.0 if is_int else ADDING_US * way.tile.BN / 64 * -(-product.k // 128)
    return cost.tile_us(tile, halved, device) + waiting + MERGING_US * (way.slices - 1) + adding


def library_us(product: Product) -> float:
    """Return the microseconds of the library's sums and of the kernel that its epilogue needs, as `way_us` has them."""
    written = 8 * product.n * product.rows / cost.LIBRARY.memory
    return ROUNDING_US + cost.library_us(product._replace(k=product.k // 2, slices=1)) + written


@cache
def choose(product: Product, weights: Weights, device: Device = H200, *, may_decline: bool = True) -> Way | None:
    """Return the way that multiplies, the cheapest; None if the matrix library is as cheap or no tile divides it.

    Args:
        product: `rows` is one of ROWS.
        may_decline: whether the library can take it; it has no scales of blocks.
    """
    found = candidates(product, weights, device)
    best = min(found, key=lambda way: way_us(way, product, device, is_int=weights.is_int), default=None)
    if best is None or not may_decline or weights.has_blocks:
        return best
    return best if product.rows <= 64 or way_us(best, product, device) < library_us(product) else None
