"""The tiles of `wide.py`, and which of them is fastest for a product."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from photon_grpc.kernels.lang.jit import cdiv

#: Columns of a step; rows of W of a group of warps and of all; rows of x that an end takes at a time.
STEP, GROUP_ROWS, ROWS, PART = 64, 64, 128, 128


class WideTile(NamedTuple):
    """Constants that the kernel is compiled for: BM rows of x, NS stages.

    IS_SPLIT: each slice of K has tiles. IS_SHARED: each group of warps has half of the slices.
    """

    BM: int
    NS: int
    IS_SPLIT: bool = False
    IS_SHARED: bool = False


#: Rows of x of a tile -> stages, and microseconds of a step on an H200.
SIZES = {128: (6, 0.36), 256: (4, 0.7)}
#: The tile whose groups have half of the slices each, and microseconds of a step of both on an H200.
SHARED, SHARED_US = WideTile(128, 4, IS_SHARED=True), 0.41
#: Microseconds of a launch and of the end of a tile; bytes a microsecond of sums that another kernel adds.
START, SUMMED = 4.0, 3.8e6
#: The library on an H200: operations a microsecond; bytes a microsecond of the kernel that writes W for it.
LIBRARY_MATRIX, WRITTEN = 7.7e8, 3.8e6


def tiles(slices: int, k: int) -> list[WideTile]:
    """Return the tiles that are considered: registers hold two sums of 128 rows of x, not of more."""
    whole = [WideTile(size, SIZES[size][0]) for size in SIZES]
    if slices == 1:
        return whole
    shared = [SHARED] if k % (slices * STEP) == 0 else []
    return [whole[0], *(tile._replace(IS_SPLIT=True) for tile in whole), *shared]


def num_tiles(tile: WideTile, rows: int, n: int, slices: int) -> int:
    """Return the tiles of all of W and x."""
    of_w = n // GROUP_ROWS if tile.IS_SHARED else n // ROWS
    return of_w * cdiv(rows, tile.BM) * (slices if tile.IS_SPLIT else 1)


@cache
def fastest(
    rows: int, n: int, k: int, slices: int = 1, bits: int = 8, multiprocessors: int = 132
) -> tuple[float, WideTile | None]:
    """Return the microseconds of a product and its tile; None: of the library with a written W."""

    def us(tile: WideTile) -> float:
        """Return the microseconds of its waves of tiles."""
        parts = slices if tile.IS_SPLIT else 2 if tile.IS_SHARED else 1
        waves = cdiv(num_tiles(tile, rows, n, slices), multiprocessors)
        summed = START + 8 * slices * rows * n / SUMMED if tile.IS_SPLIT else 0.0
        step_us = SHARED_US if tile.IS_SHARED else SIZES[tile.BM][1]
        return START + waves * cdiv(k, parts * STEP) * step_us + summed

    written = START + n * k * (2 * rows / LIBRARY_MATRIX + (2 + bits / 8) / WRITTEN)
    written += START + 8 * slices * rows * n / SUMMED if slices > 1 else 0.0
    best = min(tiles(slices, k), key=us)
    return (us(best), best) if us(best) < written else (written, None)
