"""A Linear outside of a chain is multiplied by its method's kernels, as `apply` multiplies."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.config.quantization import FORMATS
from photon_grpc.layers.kernel_linear import KernelLinear
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.quantization.methods import methods


def loaded(form: str, dtype: torch.dtype, device: str, sizes: tuple[int, int], bias: bool) -> tuple[Linear, Linear]:
    """Return a Linear of a format, and one of 32 bits with the numbers that it was made of."""
    torch.manual_seed(1)
    width, outputs = sizes
    found, plain = (
        Linear("", width, {"a": outputs}, bias=bias, dtype=of, method=method("a"))
        for of, method in ((dtype, methods(FORMATS.get(form))), (torch.float32, methods(None)))
    )
    for linear in (found, plain):
        linear.allocate(torch.device(device))
    for one, other in zip(found.targets(), plain.targets(), strict=True):
        one.tensor.normal_()
        other.tensor.copy_(one.tensor)
    found.after_load()
    return found, plain


def check(linear: Linear, plain: Linear, width: int, nums_tokens: tuple[int, ...], tolerance: float) -> None:
    kernel = KernelLinear(linear, plain.weight.device)
    for num_tokens in nums_tokens:
        x = torch.randn(num_tokens, width, device=plain.weight.device).to(linear.dtype)
        expected = plain.method.apply(plain, x.float(), None)
        found = kernel(x, None)
        assert found.dtype == linear.dtype and found.shape == expected.shape
        torch.testing.assert_close(found.float(), expected, atol=tolerance * width**0.5, rtol=0.02)


@pytest.mark.parametrize("form", ["", "int8"])
@pytest.mark.parametrize("bias", [False, True])
def test_it_multiplies_on_a_cpu(form: str, bias: bool) -> None:
    check(*loaded(form, torch.float32, "cpu", (64, 96), bias), 64, (1, 5, 200), 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(256, 640), (12288, 4096), (4096, 28672)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_are_multiplied_by_kernels(sizes: tuple[int, int], bias: bool) -> None:
    check(*loaded("int8", torch.bfloat16, "cuda", sizes, bias), sizes[0], (1, 3, 8, 9, 64, 128, 200, 700), 0.08)
