"""The tiles of packed weights with many rows of x: which are considered, and which is chosen."""

from __future__ import annotations

import pytest

from benchmarks.kernels.sweep import projections
from benchmarks.shapes import SHAPES
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.wide_tiles import (
    AT_ONCE,
    ROWS,
    chosen_tiles,
    fastest,
    is_of_use,
    num_slice_steps,
    num_tiles,
    rest_at_once,
    steps_at_once,
    tiles,
)

PROCESSORS = 132
PRODUCTS = {
    (p.n, p.k, bits)
    for name in ("1b", "8b", "qwen2.5-3b", "qwen2.5-7b", "qwen3-14b", "70b")
    for p in projections(SHAPES[name])
    for bits in (4, 8)
}


@pytest.mark.parametrize("rows", [1, 129, 192, 256, 700])
def test_sums_are_handed_on_only_where_every_program_has_a_tile(rows: int) -> None:
    for n, k, bits in PRODUCTS:
        slices = num_slices(n, k, bits=bits)
        found = [one for one in tiles(slices, k) if one.IS_HANDED and is_of_use(one, rows, n, PROCESSORS)]
        # A program that had less than a tile would be the third of one.
        assert all(num_tiles(one, rows, n, slices) > PROCESSORS and one.rows >= rows for one in found)
        assert bool(found) == (slices == 1 and n // ROWS > PROCESSORS and rows <= 256)


def test_tiles_that_are_chosen_are_those_that_are_compiled() -> None:
    for n, k, bits in PRODUCTS:
        slices = num_slices(n, k, bits=bits)
        compiled = chosen_tiles(n, k, slices, bits, PROCESSORS, 1 << 15)
        chosen = {fastest(rows, n, k, slices, bits, PROCESSORS)[1] for rows in range(1, 2048, 7)}
        assert chosen - {None} <= set(compiled)


def test_a_tile_has_no_more_rows_of_x_than_there_are() -> None:
    # Gate and up of a 14B: 272 tiles along W for 132 multiprocessors.
    chosen = {rows: fastest(rows, 34816, 5120, 1, 8, PROCESSORS)[1] for rows in (160, 192, 256)}
    assert {rows: tile and (tile.rows, tile.IS_HANDED) for rows, tile in chosen.items()} == {
        160: (160, True), 192: (192, True), 256: (256, True)
    }  # fmt: skip


def test_few_tiles_have_few_rows_of_x() -> None:
    # 40 tiles along W: three of 64 rows of x each are side by side.
    assert [tile and tile.rows for _, tile in (fastest(rows, 5120, 5120) for rows in (192, 256))] == [64, 128]


def test_blocks_have_all_steps_of_every_slice() -> None:
    for n, k, bits in PRODUCTS:
        slices = num_slices(n, k, bits=bits)
        block, rest = steps_at_once(k, slices), rest_at_once(k, slices)
        assert {num_slice_steps(k, slices, part) % block for part in range(slices)} == {rest}
    # 43 steps: not one at a time.
    assert (steps_at_once(11008, 4), rest_at_once(11008, 4)) == (AT_ONCE, 3)
