"""Products of 8-bit numbers in torch against float64: how rows are quantized, what is summed, what ends make of it."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.linear import fused8, library8, products8, quantize, tiles8
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.fused8 import Linear8
from photon_grpc.kernels.linear.tiles import Problem
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from tests.kernels import fused
from tests.kernels.eight import FORMATS, each_format, exact, weight_of

HALF = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALF, ids=str)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 128, 200, 1152])
@each_format
def test_the_largest_number_of_a_group_becomes_the_largest_of_8_bits(name: str, columns: int) -> None:
    kind, grouped = FORMATS[name]
    x = random(5, columns) * 10.0 ** torch.arange(-3, 2)[:, None]
    rows = quantize.reference(x, kind, grouped=grouped)
    width = quantize.GROUP if grouped else columns
    for row, values, scales in zip(x, rows.values.float(), rows.scales.reshape(5, -1), strict=True):
        groups = zip(row.split(width), values.split(width), scales, strict=True)
        for group, quantized, scale in groups:
            assert quantized.abs().max() == quantize.LIMITS[kind]
            # Half a step of int8; half of the last of e4m3's three bits.
            step = scale / 2 if kind == torch.int8 else group.abs() / 16 + scale * 2.0**-10
            assert ((quantized * scale - group).abs() <= step * 1.0001).all()


def test_int8_is_the_nearest_integer_and_ties_go_to_the_even_one() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.4999]])
    assert quantize.reference(x, torch.int8).values.tolist() == [[127, 0, 2, 2, 0, -2, -126, 0]]


@each_format
def test_a_row_of_zeros_stays_zeros_and_one_that_is_not_finite_becomes_nan(name: str) -> None:
    x = random(4, 256)
    x[1], x[2, 7], x[3, 200] = 0.0, torch.inf, torch.nan
    y = products8.product(x, weight_of(name, random(128, 256)))
    assert y[0].isfinite().all()
    assert not y[1].any()
    assert y[2:].isnan().all()
    assert torch.equal(y[:1], products8.product(x[:1], weight_of(name, random(128, 256))))


@each_format
def test_a_positive_factor_of_a_row_changes_its_scale_alone(name: str) -> None:
    kind, grouped = FORMATS[name]
    x = random(3, 384)
    rows, scaled = (quantize.reference(x * factor, kind, grouped=grouped) for factor in (1.0, 0.25))
    assert torch.equal(rows.values.view(torch.uint8), scaled.values.view(torch.uint8))
    assert torch.equal(rows.scales * 0.25, scaled.scales)


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 8), (8, 8), (9, 16), (129, 256), (257, 384), (513, 640)])
def test_rows_are_padded_to_a_bucket_or_to_parts(num_rows: int, padded: int) -> None:
    assert quantize.padded_rows(num_rows) == padded


# -- products ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [128, 1152, 4096 + 128])
@each_half
@each_format
def test_a_product_errs_as_the_exact_product_of_the_same_numbers_rounded_once(
    name: str, dtype: torch.dtype, columns: int
) -> None:
    x, weight = random(6, columns).to(dtype), weight_of(name, random(256, columns, seed=1))
    expected = exact(x, weight)
    error = (products8.product(x, weight).double() - expected).norm()
    assert error <= 1.05 * (expected.to(dtype).double() - expected).norm()


@each_format
def test_float32_products_lose_nothing_but_float32_roundings(name: str) -> None:
    x, weight = random(6, 2048), weight_of(name, random(256, 2048, seed=1))
    expected = exact(x, weight)
    assert (products8.product(x, weight).double() - expected).norm() <= 3e-7 * expected.norm()


@each_format
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    x, weight = random(33, 640).bfloat16(), weight_of(name, random(256, 640, seed=1))
    together = products8.product(x, weight)
    for number in (0, 7, 32):
        assert torch.equal(products8.product(x[number : number + 1], weight)[0], together[number])


def test_sums_of_int8_are_exact_where_float32_is_not() -> None:
    x = torch.full((2, 5000), 127, dtype=torch.int8)
    x[1, ::2] = -126
    w = torch.full((3, 5000), 127, dtype=torch.int8)
    w[2, 1::2] = -127
    assert torch.equal(library8.int_reference(x, w).long(), x.long() @ w.long().t())


def test_sums_of_e4m3_are_added_forwards_by_128_columns() -> None:
    # 1 is lost beside 2^24, unless it meets another one first.
    x = torch.zeros(1, 384).to(torch.float8_e4m3fn)
    x[0, 0], x[0, 128], x[0, 256] = 256.0, 1.0, 1.0
    w = torch.ones(8, 384).to(torch.float8_e4m3fn)
    w[:, 0] = 256.0
    big = library8.reference(quantize.QuantizedRows(x, torch.tensor([2.0**8])), w, torch.ones(1, 8))
    assert torch.equal(big, torch.full((1, 8), (65536.0 + 2.0) * 2.0**8))
    parts = library8.chunk_sums(x, w)
    assert [part[0, 0].item() for part in parts] == [65536.0, 1.0, 1.0]


@each_format
def test_products_of_no_rows_are_empty(name: str) -> None:
    assert products8.product(random(0, 256), weight_of(name, random(128, 256))).shape == (0, 128)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@each_format
def test_ends_are_those_of_the_dequantized_product(name: str, bias: bool) -> None:
    sizes = fused.Sizes(hidden=128, q_heads=4, kv_heads=2, head_dim=16, intermediate=192)
    h, rows = random(3, sizes.hidden), 3
    qkv_weight = weight_of(name, random(128, sizes.hidden, seed=2))
    problem = fused.Problem(128, sizes.hidden, rows, torch.float32, "cpu", bias=bias)
    rotation, cache = problem.rotation(sizes), problem.cache(sizes)
    out, expected = (HeadOutput(torch.empty(rows, 64), cache.clone(), fused.LAYER, rotation) for _ in range(2))
    fused8.qkv_apart(h, Linear8(qkv_weight, problem.b), fused.EPS, out)
    rotate_store.reference(exact(h, qkv_weight).float(), h, problem.b, fused.EPS, expected)
    fused.assert_near(out.q, expected.q.double(), torch.float32)
    fused.assert_near(out.cache, expected.cache.double(), torch.float32)

    up_weight = weight_of(name, random(256, sizes.hidden, seed=3))
    b, y = random(256) if bias else None, torch.empty(rows, 128)
    fused8.swiglu_apart(h, Linear8(up_weight, b), fused.EPS, y)
    normed = exact(h, up_weight) * (h.double().square().mean(-1, True) + fused.EPS).rsqrt()
    gate, up = (normed if b is None else normed + b.double()).chunk(2, -1)
    fused.assert_near(y, gate / (1 + (-gate).exp()) * up, torch.float32)

    down_weight, b = weight_of(name, random(128, 128, seed=4)), random(128) if bias else None
    total = h.double() + exact(y, down_weight) + (0.0 if b is None else b.double())
    fused8.add_apart(h, y, Linear8(down_weight, b))
    fused.assert_near(h, total, torch.float32)


# -- ways --------------------------------------------------------------------------------------------------------------

SHAPES = [(6144, 4096, 64), (4096, 4096, 0), (28672, 4096, 14336), (4096, 14336, 0), (1152, 896, 32), (896, 4864, 0)]


@pytest.mark.parametrize("rows", quantize.ROWS)
@pytest.mark.parametrize(("n", "k", "span"), SHAPES)
@each_format
def test_every_way_divides_its_weight_and_only_int8_is_cut(name: str, n: int, k: int, span: int, rows: int) -> None:
    kind, grouped = FORMATS[name]
    weights = tiles8.Weights(kind == torch.int8, grouped)
    way = tiles8.choose(Product(n, k, rows, span, "swiglu" if span == n // 2 else "add"), weights, may_decline=False)
    assert way is not None
    assert n % way.tile.BN == 0
    assert way.slices == 1 or kind == torch.int8
    assert tiles8.fits(way, Problem(n, k, rows), weights)


@pytest.mark.parametrize("rows", [32, 64])
def test_a_w_of_few_rows_that_is_not_cut_is_shared_by_as_many_programs_as_there_are_multiprocessors(rows: int) -> None:
    way = tiles8.choose(Product(4096, 14336, rows, 0, "add"), tiles8.Weights(is_int=False), may_decline=False)
    assert way is not None
    assert 0.9 * tiles8.H200.num_multiprocessors <= 4096 // way.tile.BN
