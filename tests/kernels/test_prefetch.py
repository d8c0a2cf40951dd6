"""Hints for the next weight: chunks within it, spread over its rows, and the instruction where they are given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.kernels.linear import prefetch
from photon_grpc.kernels.linear.prefetch import ahead

MAX_BYTES = 8 << 20


def meta(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty((rows, columns), dtype=dtype, device="meta")


@given(
    st.integers(1, 200_000),
    st.integers(8, 30_000).map(lambda eighth: 8 * eighth),
    st.sampled_from((torch.bfloat16, torch.uint8)),
)
def test_every_row_begins_with_as_many_bytes_as_the_others_and_none_lies_outside(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight = meta(rows, columns, dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefetch, "MAX_BYTES", MAX_BYTES)
        chunks = ahead(weight)
    if chunks is None:
        # Too many rows for a chunk each, or rows that do not begin at multiples of 16 bytes.
        assert rows > MAX_BYTES // 256 or columns * weight.itemsize % 16 or columns * weight.itemsize < 128
        return
    of_row = chunks.A_ROW * chunks.BYTES
    assert rows * chunks.A_ROW == chunks.CHUNKS
    assert columns == chunks.STRIDE
    assert 128 <= of_row <= columns * weight.itemsize
    assert rows * of_row <= MAX_BYTES
    assert chunks.BYTES % 16 == 0
    assert chunks.BYTES <= prefetch.MAX_CHUNK_BYTES


@pytest.mark.parametrize("weight", [None, meta(2048, 2048).t(), meta(64, 2048)[:, :1024]], ids=["none", "t", "part"])
def test_nothing_is_asked_for_where_rows_do_not_follow_one_another(weight: torch.Tensor | None) -> None:
    assert ahead(weight) is None
