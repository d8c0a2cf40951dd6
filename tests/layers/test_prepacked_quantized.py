"""Packed weights of 8 and 4 bits multiply as the numbers that they stand for do in float64."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.config.quantization import FORMATS
from photon_grpc.kernels.linear.decode import arrange, packed
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind
from photon_grpc.layers import prepacked_quantized
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.prepacked import multiplies_half
from photon_grpc.layers.prepacked_quantized import FEW_ROWS, WIDTH, NibbleWeight, holds_nibbles, pack_quantized
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.layers.quantization.rounding import quantized

needs_fbgemm = pytest.mark.skipif(not multiplies_half(), reason="this build or this CPU has no FBGEMM")
#: (outputs, inputs): less than a block, whole blocks, a part of a block at the end.
SHAPES = ((8, 128), (2 * WIDTH, 256), (3 * WIDTH + 5, 512))


def drawn(shape, bits, group, dtype=torch.float32, *, has_zeros=False):
    """Random numbers of all values, random scales."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(rows + columns + bits + group)
    num_groups = columns // group if group else 1
    if bits == 8:
        values = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    else:
        values = packed(torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator))
    scales = (0.001 + 0.01 * torch.rand(num_groups, rows, generator=generator)).to(dtype)
    zeros = torch.randint(0, 17, (num_groups, rows), generator=generator).to(dtype) if has_zeros else None
    return QuantizedWeight(values, scales, zeros, kind=WeightKind(bits, group, has_zeros))


def exact(weight):
    """(q - z) · s in float64, element by element."""
    values, bits = weight.values, weight.kind.BITS
    rows = values.shape[0]
    numbers = values if bits == 8 else torch.stack((values & 15, values >> 4), -1).view(rows, -1)
    groups = numbers.double().view(rows, weight.scales.shape[0], -1)
    zeros = torch.full_like(weight.scales, 0 if bits == 8 else 8) if weight.zeros is None else weight.zeros
    return ((groups - zeros.double().t()[:, :, None]) * weight.scales.double().t()[:, :, None]).view(rows, -1)


def inputs(num_rows, columns, dtype=torch.float32):
    """Normal numbers, and in each row one that is a hundred times as large."""
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(num_rows))
    x[:, 3] = 100.0
    return x.to(dtype)


@needs_fbgemm
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("bits", "group", "has_zeros"),
    [(8, 0, False), (8, 32, False), (8, 64, False), (8, 128, False), (4, 128, False), (4, 128, True), (4, 0, False)],
)
def test_products_are_those_of_the_numbers_in_float64(shape, bits, group, has_zeros):
    weight = drawn(shape, bits, group, has_zeros=has_zeros)
    bias = torch.linspace(-1, 1, shape[0])
    multiply, numbers = pack_quantized(weight, bias), exact(weight)
    for num_rows in (1, 3, FEW_ROWS + 1):
        x = inputs(num_rows, shape[1])
        expected = x.double() @ numbers.t() + bias.double()
        # What float32 can lose: a part of the sum of absolute products.
        bound = 2**-20 * (x.double().abs().amax(1, keepdim=True) * numbers.abs().sum(1)) + 1e-6
        found = multiply.logits(x)
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert bool(((found.double() - expected).abs() <= bound).all())


@needs_fbgemm
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(group, dtype):
    """The error is that of rounding the exact product, by at most a twentieth more."""
    weight = drawn((2 * WIDTH + 7, 256), 8, group, dtype)
    x = inputs(5, 256, dtype)
    expected = x.double() @ exact(weight).t()
    found = pack_quantized(weight, None)(x)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() <= 1.05 * (expected.to(dtype).double() - expected).norm()


@needs_fbgemm
@pytest.mark.parametrize(("bits", "group"), [(8, 0), (8, 64), (4, 128)])
def test_bits_depend_on_nothing_but_the_row_and_the_kind_of_product(bits, group):
    weight = drawn((2 * WIDTH + 7, 256), bits, group)
    multiply, x = pack_quantized(weight, None), inputs(FEW_ROWS, 256)
    together = multiply(x)
    assert torch.equal(together, multiply(x))
    assert torch.equal(together[2:3], multiply(x[2:3])) and torch.equal(together[:7], multiply(x[:7]))
    large = inputs(40, 256)
    assert torch.equal(multiply(large), multiply(large))


@needs_fbgemm
@pytest.mark.parametrize("group", [0, 128])
def test_the_largest_numbers_do_not_saturate(group):
    weight = drawn((WIDTH, 1024), 8, group)
    weight.values.fill_(-128)
    x = torch.full((1, 1024), -3.0)
    expected = x.double() @ exact(weight).t()
    assert torch.allclose(pack_quantized(weight, None)(x).double(), expected, rtol=1e-6)


@needs_fbgemm
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row(group, value):
    weight = drawn((WIDTH, 256), 8, group)
    x = inputs(2, 256)
    x[1, 7] = value
    found = pack_quantized(weight, None)(x)
    assert bool(found[0].isfinite().all()) and not bool(found[1].isfinite().any())


@needs_fbgemm
@pytest.mark.parametrize("group", [0, 128])
def test_rows_of_zeros_become_zeros(group):
    assert not pack_quantized(drawn((WIDTH, 256), 8, group), None)(torch.zeros(2, 256)).any()


@needs_fbgemm
def test_arranged_values_are_brought_back_into_their_order():
    weight = drawn((WIDTH, 256), 4, 128)
    moved = weight._replace(values=arrange(weight.values, 4), is_arranged=True)
    x = inputs(1, 256)
    assert torch.equal(pack_quantized(moved, None)(x), pack_quantized(weight, None)(x))


@needs_fbgemm
def test_zeros_between_two_numbers_and_norms_are_declined():
    weight = drawn((WIDTH, 256), 4, 128, has_zeros=True)
    assert pack_quantized(weight._replace(zeros=weight.zeros + 0.5), None) is None
    assert pack_quantized(weight._replace(norm=torch.ones(256)), None) is None


def test_a_cpu_without_these_products_packs_nothing(monkeypatch):
    monkeypatch.setattr(prepacked_quantized, "multiplies_half", lambda: False)
    assert pack_quantized(drawn((WIDTH, 256), 8, 128), None) is None


@needs_fbgemm
@pytest.mark.parametrize(("name", "bytes_a_weight"), [("int8", 1.03), ("int8-g128", 1.45), ("int4-g128", 1.45)])
def test_a_loaded_layer_of_a_cpu_is_packed_and_forgets_its_float_weight(name, bytes_a_weight):
    linear = Linear("a.", 256, {"x": 150}, bias=True, dtype=torch.float32, method=methods(FORMATS[name])("a.x"))
    linear.allocate(torch.device("cpu"))
    linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    linear.bias.normal_(generator=torch.Generator().manual_seed(1))
    rounded = quantized(linear.slices(), linear.weight, FORMATS[name], torch.float32)
    weight = QuantizedWeight(*rounded, kind=WeightKind(FORMATS[name].bits, FORMATS[name].block[1]))
    linear.after_load()
    x = inputs(3, 256)
    expected = x.double() @ exact(weight).t() + linear.bias.double()
    assert torch.allclose(linear(x, None).double(), expected, atol=5e-3)
    assert not list(linear.targets()) and linear.method.fold(linear) is Folded.NO
    assert linear.method.num_bytes(linear) <= bytes_a_weight * 150 * 256


@needs_fbgemm
@pytest.mark.parametrize("group", [32, 128])
def test_nibbles_in_torchs_tiles_are_rounded_once_and_a_row_has_the_same_bits_beside_others(group):
    weight = drawn((128, 512), 4, group, torch.bfloat16)
    assert holds_nibbles(weight)
    x, numbers = inputs(FEW_ROWS + 1, 512, torch.bfloat16), exact(weight)
    multiply = NibbleWeight(prepacked_quantized._numbers(weight), weight.scales)
    expected = x.double() @ numbers.t()
    rounded = (expected.bfloat16().double() - expected).norm()
    few = multiply(x[:FEW_ROWS])
    assert (few.double() - expected[:FEW_ROWS]).norm() <= 1.05 * rounded
    assert (multiply(x).double() - expected).norm() <= 1.05 * rounded
    assert all(torch.equal(multiply(x[i : i + 1])[0], few[i]) for i in range(FEW_ROWS))
    bound = 2**-20 * (x.double().abs().amax(1, keepdim=True) * numbers.abs().sum(1)) + 1e-6
    assert bool(((multiply.logits(x).double() - expected).abs() <= bound).all())
