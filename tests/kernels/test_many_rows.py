"""The tile of a product of many rows: chosen by its waves, never where the library is faster."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.kernels.linear import cut, many_rows
from photon_grpc.kernels.linear.many_rows import TILES, num_tiles


@given(st.integers(1, 20_000), st.integers(1, 4000).map(lambda number: 8 * number))
def test_tiles_cover_all_rows_and_no_more(rows: int, n: int) -> None:
    for tile in TILES:
        of_x, of_w = 64 * tile.GROUPS, 128 * tile.HALVES
        number = num_tiles(tile, rows, n)
        assert number * of_x * of_w >= rows * n
        assert number <= (rows / of_x + 1) * (n / of_w + 1)


def test_slices_begin_with_a_step() -> None:
    """Else a step would hold columns of two slices."""
    assert cut.GRAIN % many_rows.STEP == 0


def test_the_choice_has_the_fewest_microseconds_and_declines_few_rows() -> None:
    chosen = [many_rows._choose(rows, 2048, 8192, 2, 132) for rows in (129, 2048, 8192)]
    assert chosen[0] is None
    assert all(tile in TILES for tile in chosen[1:])


@pytest.mark.parametrize("slices", [1, 2])
def test_a_cpu_has_no_tile(slices: int) -> None:
    x, w = torch.zeros(512, 128, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)
    assert many_rows.choose(x, w, slices) is None
