"""How the lanes of attention over latents are shared out, and the memory that they take between two kernels."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.kernels.attention import latent
from photon_grpc.kernels.attention.latent import LANE, lane_bytes, num_shares

MULTIPROCESSORS = 132


@given(tiles=st.integers(1, 2000), lanes=st.integers(1, 700))
def test_no_program_is_without_a_lane_and_there_are_few_waves(tiles: int, lanes: int) -> None:
    shares = num_shares(tiles, lanes, MULTIPROCESSORS)
    assert 1 <= shares <= lanes
    assert shares == 1 or tiles * (shares - 1) < 2 * MULTIPROCESSORS


def test_few_rows_of_long_contexts_fill_the_device() -> None:
    assert [num_shares(tiles, 640, MULTIPROCESSORS) for tiles in (1, 8, 32, 64, 132)] == [132, 16, 4, 2, 1]
    assert num_shares(8, 2, MULTIPROCESSORS) == 2


@given(num_tokens=st.integers(1, 9), heads=st.integers(1, 20), longest=st.integers(1, 3000), rank=st.integers(1, 600))
def test_the_bytes_of_lanes_are_those_that_are_allocated(num_tokens: int, heads: int, longest: int, rank: int) -> None:
    parts = latent._parts(torch.empty(num_tokens, heads, 0, device="meta"), -(-longest // LANE), rank)
    assert sum(part.nbytes for part in parts) == lane_bytes(num_tokens, heads, longest, rank)
