"""Embedding rows in the interpreter, without dependent launch: equal to torch's."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import embed
from photon_grpc.kernels.linear.weight import WeightKind
from tests.kernels.packed import arranged, numbers, packed_weight


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [None, 33.9375])
@pytest.mark.parametrize("size", [96, 1024, 2512])
def test_rows_are_those_of_the_table(size: int, factor: float | None, ids: torch.dtype, dtype: torch.dtype) -> None:
    table, token_ids = torch.randn(50, size).to(dtype), torch.tensor([0, 49, 7, 7], dtype=ids)
    # Rows after the requested ones are not written.
    h = torch.full((6, size), torch.nan, dtype=dtype)
    partial = torch.full((6, size // 16), torch.nan)
    embed.launch(table, token_ids, h[:4], partial[:4], factor)
    torch.testing.assert_close(partial[:4], squares.reference(h[:4]), rtol=1e-6, atol=0.0)
    expected = torch.nn.functional.embedding(token_ids, table)
    assert torch.equal(h[:4], expected if factor is None else expected * factor)
    assert h[4:].isnan().all()
    assert partial[4:].isnan().all()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("factor", [None, 33.9375])
@pytest.mark.parametrize("is_arranged", [False, True])
@pytest.mark.parametrize("size", [96, 1024, 2512])
def test_rows_of_8_bits_are_dequantized(size: int, factor: float | None, is_arranged: bool, dtype: torch.dtype) -> None:
    table, token_ids = packed_weight(50, size, WeightKind(8), dtype), torch.tensor([0, 49, 7, 7])
    expected = numbers(table)[token_ids]
    held = arranged(table) if is_arranged else table
    h, partial = torch.full((4, size), torch.nan, dtype=dtype), torch.full((4, size // 16), torch.nan)
    embed.launch(held, token_ids, h, partial, factor)
    assert torch.equal(h, (expected if factor is None else expected * factor).to(dtype))
    assert torch.equal(embed.rows(held, token_ids).double(), expected)
    torch.testing.assert_close(partial, squares.reference(h), rtol=1e-6, atol=0.0)


def test_no_tokens_launch_nothing() -> None:
    h = torch.full((1, 96), torch.nan)
    embed.launch(torch.randn(50, 96), torch.empty(0, dtype=torch.int32), h[:0], torch.empty(0, 6))
    assert h.isnan().all()
