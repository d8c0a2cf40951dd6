"""The references of the fused projections against float64, and which tiles a shape is given."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.linear import tiles
from photon_grpc.kernels.linear.fused_linear import add_launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from tests.kernels.fused import EPS, LAYER, Problem, Sizes, assert_near

TILE = Tile("gemv", 16, 32, 1, 2)
SIZES = Sizes(hidden=64, q_heads=4, kv_heads=2, head_dim=16, intermediate=48)
each_bias = pytest.mark.parametrize("bias", [False, True])


@each_bias
def test_add(bias: bool) -> None:
    problem = Problem(SIZES.hidden, SIZES.intermediate, 3, torch.float32, "cpu", bias=bias)
    h = problem.random(3, SIZES.hidden)
    expected = h.double() + problem.product(problem.x)
    add_launch(h, problem.x, problem.linear, TILE, problem.counters)
    assert_near(h, expected, torch.float32)


@each_bias
def test_swiglu(bias: bool) -> None:
    problem = Problem(2 * SIZES.intermediate, SIZES.hidden, 3, torch.float32, "cpu", bias=bias)
    y = torch.empty(3, SIZES.intermediate)
    swiglu_launch(problem.x, problem.linear, EPS, y, TILE, problem.counters)
    assert_near(y, problem.expected_swiglu(), torch.float32)


@each_bias
def test_qkv(bias: bool) -> None:
    heads = SIZES.q_heads + 2 * SIZES.kv_heads
    problem = Problem(heads * SIZES.head_dim, SIZES.hidden, 3, torch.float32, "cpu", bias=bias)
    rotation, cache = problem.rotation(SIZES), problem.cache(SIZES)
    q = torch.empty(3, SIZES.q_heads * SIZES.head_dim)
    out = HeadOutput(q, cache, LAYER, rotation)
    qkv_launch(problem.x, problem.linear, EPS, out, TILE, problem.counters)
    expected_q, expected_cache = problem.expected_qkv(SIZES, rotation)
    assert_near(q, expected_q, torch.float32)
    assert_near(cache, expected_cache, torch.float32)


# (rows, columns, distance of a pair): the projections of Llama-3.2-1B, Llama-3.1-8B, Qwen2.5-0.5B and 7B.
SHAPES = [
    (3072, 2048, 32), (2048, 2048, 0), (16384, 2048, 8192), (2048, 8192, 0),
    (6144, 4096, 64), (4096, 4096, 0), (28672, 4096, 14336), (4096, 14336, 0),
    (1152, 896, 32), (896, 896, 0), (9728, 896, 4864), (896, 4864, 0),
    (4608, 3584, 64), (3584, 3584, 0), (37888, 3584, 18944), (3584, 18944, 0),
]  # fmt: skip


@pytest.mark.parametrize("has_wgmma", [True, False])
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_model_has_tiles_that_divide_it(shape: tuple[int, int, int], rows: int, has_wgmma: bool) -> None:
    n, k, span = shape
    tile = tiles.choose(tiles.Problem(n, k, rows, span), has_wgmma=has_wgmma)
    assert tile is not None
    assert n % tile.BN == 0
    assert k % (tile.BK * (tile.KW if tile.kind == "gemv" else tile.SPLITS)) == 0
    assert tiles.shared_bytes(tile, rows) <= 227 * 1024
    assert has_wgmma or tile.kind == "gemv"
    if span:
        assert span % (tile.BN // 2) == 0


def test_the_table_holds_only_tiles_that_fit_their_shape() -> None:
    spans = {(n, k): span for n, k, span in SHAPES}
    for (n, k), by_rows in tiles.TABLE.items():
        for rows, tile in by_rows.items():
            assert tile is None or tiles.fits(tile, tiles.Problem(n, k, rows, spans.get((n, k), 0))), (n, k, rows, tile)


def test_what_neither_the_table_nor_a_default_takes_is_left_to_the_library() -> None:
    assert tiles.choose(tiles.Problem(3072, 2048, 128, 32)) is None
    assert tiles.choose(tiles.Problem(1024, 1024, 128, 0)) is None


@pytest.mark.parametrize(
    ("num_rows", "bucket"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128), (129, None)]
)
def test_rows_are_padded_to_the_smallest_bucket_that_holds_them(num_rows: int, bucket: int | None) -> None:
    assert tiles.bucket(num_rows) == bucket


def test_a_shape_that_nothing_divides_has_no_tile() -> None:
    assert tiles.choose(tiles.Problem(2048, 2047, 8, 0)) is None
    assert tiles.choose(tiles.Problem(2040, 2048, 8, 0)) is None


def test_a_head_is_given_no_tile_that_shares_its_sums_out() -> None:
    for n, k in tiles.TABLE:
        for rows in tiles.BUCKETS:
            tile = tiles.choose(tiles.Problem(n, k, rows), may_share=False)
            assert tile is None or tile.SPLITS == 1, (n, k, rows)
