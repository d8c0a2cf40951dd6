"""Rows in 8 bits, and products from their sums, in the interpreter: the bits of the references."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.linear import quantize, rescale

KINDS = list(quantize.LIMITS)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [64, 2244])
@pytest.mark.parametrize("many_rows", [quantize.MANY_ROWS, 7])
def test_rows_have_the_bits_of_the_reference(
    size: int, kind: torch.dtype, grouped: bool, dtype: torch.dtype, many_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "MANY_ROWS", many_rows)
    x = (torch.randn(9, size) * torch.tensor([1, 1e-3, 100, 0, 7, 1, 1.0, 1, 2])[:, None]).to(dtype)
    x[5, 3], x[6, 3] = torch.inf, torch.nan
    expected, rows = quantize.reference(x, kind, grouped=grouped), quantize.launch(x, kind, grouped=grouped)
    assert torch.equal(rows.values.view(torch.uint8), expected.values.view(torch.uint8))
    torch.testing.assert_close(rows.scales, expected.scales, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.each_value
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("size", [64, 2240])
def test_rows_are_multiplied_by_the_weight_of_a_norm_and_leave_its_factors(size: int, grouped: bool) -> None:
    x, weight = torch.randn(5, size).half(), torch.rand(size).half()
    expected = quantize.reference(x * weight, torch.int8, grouped=grouped)
    rows = quantize.launch(x, torch.int8, grouped=grouped, weight=weight, eps=1e-5)
    assert torch.equal(rows.values, expected.values)
    assert torch.equal(rows.scales, expected.scales)
    assert rows.norms is not None
    torch.testing.assert_close(rows.norms, (x.float().square().mean(1) + 1e-5).rsqrt())


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


@pytest.mark.each_value
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
