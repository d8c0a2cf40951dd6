"""Packed weights as numbers, by the kernel in the interpreter and by torch."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.linear import dequantize
from photon_grpc.kernels.linear.weight import WeightKind
from tests.kernels.packed import KINDS, arranged, numbers, packed_weight


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_value_is_rounded_once(kind: WeightKind, dtype: torch.dtype) -> None:
    weight = packed_weight(9, 256, kind, dtype)
    expected = numbers(weight)
    for given in (weight, arranged(weight)):
        by_torch, by_kernel = torch.full((2, 9, 256), torch.nan, dtype=dtype)
        dequantize.reference(given, by_torch)
        dequantize.launch(given, by_kernel)
        assert torch.equal(by_torch.double(), expected)
        assert torch.equal(by_kernel.double(), expected)
