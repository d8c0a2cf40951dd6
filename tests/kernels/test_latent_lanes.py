"""The memory that lanes of attention over latents take between two kernels."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.kernels.attention import latent
from photon_grpc.kernels.attention.latent import LANE, lane_bytes


@given(num_tokens=st.integers(1, 9), heads=st.integers(1, 20), longest=st.integers(1, 3000), rank=st.integers(1, 600))
def test_the_bytes_of_lanes_are_those_that_are_allocated(num_tokens: int, heads: int, longest: int, rank: int) -> None:
    parts = latent._parts(torch.empty(num_tokens, heads, 0, device="meta"), -(-longest // LANE), rank)
    assert sum(part.nbytes for part in parts) == lane_bytes(num_tokens, heads, longest, rank)
