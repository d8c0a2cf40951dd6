"""The references of the fused projections against float64, and which tiles a shape is given."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.linear import tiles
from photon_grpc.kernels.linear.fused_linear import Affine, Gate, add_launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.linear.weight import WeightKind
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from tests.kernels.fused import EPS, LAYER, Problem, Sizes, assert_near, stream
from tests.kernels.packed import arranged, numbers, packed_weight

TILE = Tile("gemv", 16, 32, 1, 2)
SIZES = Sizes(hidden=64, q_heads=4, kv_heads=2, head_dim=16, intermediate=48)
each_bias = pytest.mark.parametrize("bias", [False, True])


@each_bias
def test_add(bias: bool) -> None:
    problem = Problem(SIZES.hidden, SIZES.intermediate, 3, torch.float32, "cpu", bias=bias)
    h = problem.random(3, SIZES.hidden)
    expected = h.double() + problem.product(problem.x)
    add_launch(stream(h), problem.x, problem.linear, TILE, problem.counters)
    assert_near(h, expected, torch.float32)


@each_bias
def test_swiglu(bias: bool) -> None:
    problem = Problem(2 * SIZES.intermediate, SIZES.hidden, 3, torch.float32, "cpu", bias=bias)
    y = torch.empty(3, SIZES.intermediate)
    swiglu_launch(stream(problem.x), problem.linear, Gate(EPS), y, TILE, problem.counters)
    assert_near(y, problem.expected_swiglu(), torch.float32)


@pytest.mark.parametrize("is_normed", [False, True])
@each_bias
def test_qkv(bias: bool, is_normed: bool) -> None:
    heads = SIZES.q_heads + 2 * SIZES.kv_heads
    problem = Problem(heads * SIZES.head_dim, SIZES.hidden, 3, torch.float32, "cpu", bias=bias)
    rotation, cache = problem.rotation(SIZES), problem.cache(SIZES)
    norms = (problem.random(SIZES.head_dim), problem.random(SIZES.head_dim)) if is_normed else None
    q = torch.empty(3, SIZES.q_heads * SIZES.head_dim)
    out = HeadOutput(q, cache, LAYER, rotation, norms)
    qkv_launch(stream(problem.x), problem.linear, EPS, out, TILE, problem.counters)
    expected_q, expected_cache = problem.expected_qkv(SIZES, rotation, norms)
    assert_near(q, expected_q, torch.float32)
    assert_near(cache, expected_cache, torch.float32)


@pytest.mark.parametrize("is_arranged", [False, True])
def test_a_packed_weight_is_multiplied_as_the_numbers_that_it_stands_for(is_arranged: bool) -> None:
    weight = packed_weight(64, 128, WeightKind(4, 32, True, True), torch.float32)
    given = arranged(weight) if is_arranged else weight
    problem = Problem(64, 128, 3, torch.float32, "cpu")
    h = problem.random(3, 64)
    expected = h.double() + problem.x.double() @ numbers(weight).T
    add_launch(stream(h), problem.x, Affine(given), TILE, problem.counters)
    assert_near(h, expected, torch.float32)


def test_kernels_refuse_a_packed_weight_in_natural_order() -> None:
    weight = packed_weight(16, 64, WeightKind(8))
    assert Affine(arranged(weight)).operand.w.shape == (16, 64)
    with pytest.raises(ValueError, match="natural order"):
        _ = Affine(weight).operand


@pytest.mark.parametrize(
    ("num_rows", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128), (129, None)]
)
def test_rows_are_padded_to_the_smallest_bucket_that_holds_them(num_rows: int, bucket: int | None) -> None:
    assert tiles.bucket(num_rows) == bucket
