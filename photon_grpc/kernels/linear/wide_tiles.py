"""The tiles of `wide.py`, which of them is fastest for a product, and how many steps of a slice overlap."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from photon_grpc.kernels.lang.gluon import constexpr_function
from photon_grpc.kernels.lang.jit import cdiv
from photon_grpc.kernels.linear.cut import slice_columns

#: Columns of a step; rows of W of a group of warps and of all.
STEP, GROUP_ROWS, ROWS = 64, 64, 128
#: Most steps that overlap before a group of warps waits for all of them.
AT_ONCE = 8


@constexpr_function
def num_slice_steps(k: int, slices: int, part: int) -> int:
    """Return the steps of a slice."""
    columns = slice_columns(k, slices)
    return -(-min(columns, k - part * columns) // 64)


@constexpr_function
def steps_at_once(k: int, slices: int) -> int:
    """Return the steps of which each is decoded while the one before is multiplied; a slice has several, and a rest."""
    first, last, most = num_slice_steps(k, slices, 0), num_slice_steps(k, slices, slices - 1), AT_ONCE
    while first % most or last % most:
        most //= 2
    return AT_ONCE if rest_at_once(k, slices) else most


@constexpr_function
def rest_at_once(k: int, slices: int) -> int:
    """Return the steps behind the last AT_ONCE of a slice that are a block of their own, or 0: of odd numbers of steps.

    A second block takes time by the length of its code: more than steps gain that four or two divide.
    """
    first, last = num_slice_steps(k, slices, 0), num_slice_steps(k, slices, slices - 1)
    return first % AT_ONCE if slices > 1 and first == last and first % 2 else 0


class WideTile(NamedTuple):
    """Constants that the kernel is compiled for: BM and MORE rows of x, multiplied apart, and NS stages.

    PIECES: of a step, one decoded while the one before is multiplied. IS_SPLIT: each slice of K has tiles. IS_SHARED:
    each group of warps has half of the slices. IS_HANDED: programs have as many steps each (`handed.py`).
    """

    BM: int
    NS: int
    MORE: int = 0
    PIECES: int = 1
    IS_SPLIT: bool = False
    IS_SHARED: bool = False
    IS_HANDED: bool = False

    @property
    def rows(self) -> int:
        """The rows of x."""
        return self.BM + self.MORE


class StepCost(NamedTuple):
    """Microseconds of a step on an H200.

    few: by few programs; full, by the bits of W: by as many as it has multiprocessors, whose clock is lower then;
    handed: the same where they are at different columns of x.
    """

    few: float
    full: dict[int, float]
    handed: dict[int, float]


#: Of tiles of all slices.
WHOLE = {
    WideTile(64, 8): StepCost(0.25, {8: 0.28, 4: 0.27}, {8: 0.315, 4: 0.285}),
    WideTile(128, 6): StepCost(0.335, {8: 0.415, 4: 0.41}, {8: 0.415, 4: 0.41}),
    WideTile(128, 6, MORE=32): StepCost(0.46, {8: 0.53, 4: 0.5}, {8: 0.585, 4: 0.51}),
    WideTile(128, 5, MORE=64): StepCost(0.49, {8: 0.55, 4: 0.54}, {8: 0.61, 4: 0.57}),
    WideTile(128, 4, MORE=128, PIECES=2): StepCost(0.59, {8: 0.76, 4: 0.74}, {8: 0.76, 4: 0.74}),
}
#: The tile whose groups have half of the slices each, and microseconds of a step of both on an H200.
SHARED, SHARED_US = WideTile(128, 4, PIECES=2, IS_SHARED=True), 0.41
#: Microseconds of a launch and of the end of a tile; bytes a microsecond of sums that another kernel adds.
START, SUMMED = 4.0, 3.8e6
#: Microseconds for each row of x of sums that are handed on.
HANDED_US = 0.045
#: The library on an H200: operations a microsecond; bytes a microsecond of the kernel that writes W for it.
LIBRARY_MATRIX, WRITTEN = 7.7e8, 3.8e6


def tiles(slices: int, k: int) -> list[WideTile]:
    """Return the tiles that are considered: registers hold two sums of 128 rows of x, not of more."""
    if slices == 1:
        return [*WHOLE, *(tile._replace(IS_HANDED=True) for tile in WHOLE if WHOLE[tile].handed)]
    whole = [tile for tile in WHOLE if not tile.MORE]
    shared = [SHARED] if k % (slices * STEP) == 0 else []
    return [*whole, *(tile._replace(IS_SPLIT=True) for tile in whole if tile.BM == 128), *shared]


def num_tiles(tile: WideTile, rows: int, n: int, slices: int) -> int:
    """Return the tiles of all of W and x."""
    of_w = n // GROUP_ROWS if tile.IS_SHARED else n // ROWS
    return of_w * cdiv(rows, tile.rows) * (slices if tile.IS_SPLIT else 1)


@cache
def fastest(
    rows: int, n: int, k: int, slices: int = 1, bits: int = 8, multiprocessors: int = 132
) -> tuple[float, WideTile | None]:
    """Return the microseconds of a product and its tile; None: of the library with a written W."""

    def us(tile: WideTile) -> float:
        """Return the microseconds of its waves of tiles."""
        full, rest = divmod(num_tiles(tile, rows, n, slices), multiprocessors)
        share = rest / multiprocessors
        if tile.IS_SHARED:
            return START + (full + (rest > 0)) * cdiv(k, 2 * STEP) * SHARED_US
        cost = WHOLE[tile._replace(IS_SPLIT=False, IS_HANDED=False)]
        step_us = (cost.handed if tile.IS_HANDED else cost.full)[bits]
        steps = cdiv(k, (slices if tile.IS_SPLIT else 1) * STEP)
        if tile.IS_HANDED:
            return START + HANDED_US * tile.rows + (full + share) * steps * step_us
        last_us = (cost.few + share * (step_us - cost.few)) if rest else 0.0
        summed = START + 8 * slices * rows * n / SUMMED if tile.IS_SPLIT else 0.0
        return START + steps * (full * step_us + last_us) + summed

    written = START + n * k * (2 * rows / LIBRARY_MATRIX + (2 + bits / 8) / WRITTEN)
    written += START + 8 * slices * rows * n / SUMMED if slices > 1 else 0.0
    best = min((tile for tile in tiles(slices, k) if is_of_use(tile, rows, n, multiprocessors)), key=us)
    return (us(best), best) if us(best) < written else (written, None)


def is_of_use(tile: WideTile, rows: int, n: int, multiprocessors: int) -> bool:
    """Return whether a tile is considered for so many rows: few kernels are compiled for each product.

    Sums are handed on where W is read once, and every program has a tile.
    """
    if tile.IS_HANDED:
        return rows <= tile.rows and n // ROWS > multiprocessors
    return tile.rows % 128 == 0 or rows <= (tile.rows if tile.MORE else 3 * tile.BM)


@cache
def chosen_tiles(n: int, k: int, slices: int, bits: int, multiprocessors: int, most_rows: int) -> tuple[WideTile, ...]:
    """Return the tiles that are fastest for some number of rows."""
    rows = [1, *range(32, 4097, 32), *range(4608, most_rows + 1, 512)]
    found = (fastest(each, n, k, slices, bits, multiprocessors)[1] for each in rows)
    return tuple(dict.fromkeys(tile for tile in found if tile is not None))
