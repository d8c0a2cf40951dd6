"""The fused projections on CUDA against float64: every kind of tile, every bucket, real and odd shapes, NaN wherever it may be.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.fused_linear import add_launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.parts import tiles
from photon_grpc.kernels.parts.tiles import Tile
from tests.kernels.fused import EPS, LAYER, Problem, Sizes, assert_near

pytestmark = pytest.mark.gpu
# Llama-3.2-1B; Qwen2.5-0.5B's; heads of 128 with few of them.
SIZES = [Sizes(2048, 32, 8, 64, 8192), Sizes(896, 14, 2, 64, 4864, 64), Sizes(512, 4, 1, 128, 768)]
TILES = {
    "ring": Tile("ring", 16, 32, 4, 4),
    "ring of wide tiles": Tile("ring", 32, 32, 2, 2),
    "wide": Tile("wide", 64, 64, 4, 4),
    "wide, shared out": Tile("wide", 64, 64, 4, 3, 2),
}
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
each_rows = pytest.mark.parametrize("rows", [1, 5, 8, 16, 33])
each_kind = pytest.mark.parametrize("kind", TILES)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_bias = pytest.mark.parametrize("bias", [False, True])


def tile_for(kind: str, n: int, k: int, rows: int, span: int) -> Tile:
    tile = TILES[kind]
    bucket = tiles.bucket(rows)
    if tile.kind == "wide" and bucket < 16:
        pytest.skip("wgmma has eight columns at least, this kernel sixteen rows")
    if not tiles.fits(tile, n, k, bucket, span):
        pytest.skip("the tile does not divide the shape")
    return tile


@each_bias
@each_dtype
@each_kind
@each_rows
@each_size
def test_add(sizes: Sizes, rows: int, kind: str, dtype: torch.dtype, bias: bool) -> None:
    n, k = sizes.hidden, sizes.intermediate
    problem = Problem(n, k, rows, dtype, "cuda", bias=bias)
    h = problem.random(rows, n)
    expected = h.double().cpu() + problem.product(problem.x)
    add_launch(h, problem.x, problem.w, problem.b, tile_for(kind, n, k, rows, 0), problem.counters)
    assert_near(h, expected, dtype)
    assert not problem.counters.any()


@each_bias
@each_dtype
@each_kind
@each_rows
@each_size
def test_swiglu(sizes: Sizes, rows: int, kind: str, dtype: torch.dtype, bias: bool) -> None:
    n, k = 2 * sizes.intermediate, sizes.hidden
    problem = Problem(n, k, rows, dtype, "cuda", bias=bias)
    y = torch.full((rows, sizes.intermediate), torch.nan, dtype=dtype, device="cuda")
    tile = tile_for(kind, n, k, rows, sizes.intermediate)
    swiglu_launch(problem.x, problem.w, problem.b, EPS, y, tile, problem.counters)
    assert_near(y, problem.expected_swiglu(), dtype)
    assert not problem.counters.any()


@pytest.mark.parametrize("surplus", [None, 1])
@each_bias
@each_dtype
@each_kind
@each_rows
@each_size
def test_qkv(sizes: Sizes, rows: int, kind: str, dtype: torch.dtype, bias: bool, surplus: int | None) -> None:
    n, k = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden
    tile = tile_for(kind, n, k, rows, sizes.head_dim // 2)
    problem = Problem(n, k, rows, dtype, "cuda", bias=bias)
    rotation, cache = problem.rotation(sizes, None if surplus is None else rows - surplus), problem.cache(sizes)
    whole = torch.full((rows + 1, sizes.q_heads * sizes.head_dim), torch.nan, dtype=dtype, device="cuda")
    qkv_launch(problem.x, problem.w, problem.b, EPS, whole[:rows], cache, LAYER, rotation, tile, problem.counters)
    expected_q, expected_cache = problem.expected_qkv(sizes, rotation)
    assert_near(whole[:rows], expected_q, dtype)
    assert_near(cache[1:], expected_cache[1:], dtype)
    # Nothing but the pages of its tokens, and block 0 for surplus ones.
    assert whole[rows:].isnan().all()
    assert cache[0].isnan().all() == (surplus is None)
    assert not problem.counters.any()


@pytest.mark.parametrize("kind", ["ring", "wide, shared out"])
def test_the_same_every_time(kind: str) -> None:
    problem = Problem(2048, 8192, 16, torch.bfloat16, "cuda")
    start = problem.random(16, 2048)
    results = []
    for _ in range(20):
        h = start.clone()
        add_launch(h, problem.x, problem.w, None, TILES[kind], problem.counters)
        results.append(h)
    assert all(torch.equal(result, results[0]) for result in results)
