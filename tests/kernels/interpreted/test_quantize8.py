"""Rows in 8 bits, and products from their sums, in the interpreter: the bits of the references."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import swiglu
from photon_grpc.kernels.linear import quantize, rescale

KINDS = list(quantize.LIMITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [64, 2244])
def test_rows_have_the_bits_of_the_reference(size: int, kind: torch.dtype, grouped: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(7, size) * torch.tensor([1, 1e-3, 100, 0, 7, 1, 1.0])[:, None]).to(dtype)
    x[5, 3], x[6, 3] = torch.inf, torch.nan
    expected, rows = quantize.reference(x, kind, grouped=grouped), quantize.launch(x, kind, grouped=grouped)
    assert torch.equal(rows.values.view(torch.uint8), expected.values.view(torch.uint8))
    torch.testing.assert_close(rows.scales, expected.scales, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_number_of_8_bits_and_every_middle_between_two_is_rounded_as_in_torch(kind: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(kind).float()
    numbers = numbers[numbers.isfinite() & (numbers.abs() <= quantize.LIMITS[kind])].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat(
        (middles, torch.nextafter(middles, torch.tensor(1e9)), torch.nextafter(middles, -torch.tensor(1e9)))
    )
    x = torch.cat((numbers, near))[None].contiguous()
    expected, rows = quantize.reference(x, kind), quantize.launch(x, kind)
    assert rows.scales.item() == 1.0
    assert torch.equal(rows.values.view(torch.uint8), expected.values.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("size", [96, 2500])
def test_sums_are_rescaled_as_in_the_reference(size: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    sums = (torch.randn(5, size) * 1e7).to(kind)
    s_x, s_w = torch.rand(5) * 1e-3, torch.rand(size) * 1e-3
    y, expected = torch.empty(5, size, dtype=dtype), torch.empty(5, size, dtype=dtype)
    rescale.launch(sums, s_x, s_w, y)
    rescale.reference(sums, s_x, s_w, expected)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [torch.int32, torch.float32], ids=str)
def test_sums_are_added_and_gated_as_by_two_kernels(kind: torch.dtype, bias: bool) -> None:
    size, hidden, dtype = 2500, 96, torch.float16
    sums, s_x, s_w = (torch.randn(3, 2 * size) * 1e4).to(kind), torch.rand(3) * 1e-3, torch.rand(2 * size) * 1e-1
    b = torch.randn(2 * size).to(dtype) if bias else None
    h = torch.randn(3, hidden).to(dtype)
    y, expected = torch.empty(3, size, dtype=dtype), torch.empty(3, size, dtype=dtype)
    product = torch.empty(3, 2 * size)
    rescale.launch(sums, s_x, s_w, product)
    swiglu.norm_launch(product, h, b, 1e-5, expected)
    rescale.swiglu_launch(sums, s_x, s_w, b, h, 1e-5, y)
    assert torch.equal(y, expected)

    residual = torch.randn(3, 2 * size).to(dtype)
    added = residual.clone()
    rescale.add_launch(sums, s_x, s_w, b, added)
    rescale.add_reference(sums, s_x, s_w, b, residual)
    assert torch.equal(added, residual)
