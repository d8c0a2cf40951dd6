"""The fused projections on CUDA against float64: every kind of tile, every bucket, real and odd shapes.

Every byte that no program may read is NaN.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import head, tiles
from photon_grpc.kernels.linear.fused_linear import Affine, Gate, add_launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from photon_grpc.kernels.sampling import sample
from tests.kernels.fused import EPS, LAYER, Problem, Sizes, assert_near, stream

pytestmark = pytest.mark.gpu
# Llama-3.2-1B; Qwen2.5-0.5B's; heads of 128 with few of them.
SIZES = [Sizes(2048, 32, 8, 64, 8192), Sizes(896, 14, 2, 64, 4864, 64), Sizes(512, 4, 1, 128, 768)]
#: Tile, slices of K.
TILES = {
    "gemv": (Tile("gemv", 16, 64, 1, 4), 1),
    "gemv, two warps": (Tile("gemv", 32, 128, 2, 3), 1),
    "gemv, slices": (Tile("gemv", 16, 64, 2, 4), 2),
    "gemv, slices of two warps": (Tile("gemv", 32, 64, 8, 2), 4),
    "wgmma": (Tile("wgmma", 64, 64, 4, 4), 1),
    "wgmma, slices": (Tile("wgmma", 64, 64, 4, 3), 2),
    "wgmma, x first": (Tile("wgmma", 32, 64, 4, 4), 1),
    "wgmma, x first, slices": (Tile("wgmma", 16, 64, 4, 3), 2),
}
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
each_rows = pytest.mark.parametrize("rows", [1, 5, 8, 16, 33])
each_kind = pytest.mark.parametrize("kind", TILES)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_bias = pytest.mark.parametrize("bias", [False, True])


def tile_for(kind: str, problem: Problem, span: int) -> tuple[Affine, Tile]:
    (n, k), rows = problem.w.shape, problem.rows
    tile, slices = TILES[kind]
    bucket = tiles.bucket(rows)
    if tile.kind == "wgmma" and bucket < 16:
        pytest.skip("wgmma has eight columns at least, this kernel sixteen rows")
    if not tiles.fits(tile, tiles.Problem(n, k, bucket, span, SLICES=slices)):
        pytest.skip("the tile does not divide the shape")
    return problem.linear._replace(slices=slices), tile


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
    changed = stream(h)
    add_launch(changed, problem.x, *tile_for(kind, problem, 0), problem.counters)
    assert_near(h, expected, dtype, roundings=2)
    assert torch.equal(changed.partial, squares.reference(h))
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
    given = tile_for(kind, problem, sizes.intermediate)
    swiglu_launch(stream(problem.x), given[0], Gate(EPS), y, given[1], problem.counters)
    assert_near(y, problem.expected_swiglu(), dtype, roundings=2)
    assert not problem.counters.any()


@each_bias
@each_dtype
@each_kind
@each_rows
@each_size
def test_qkv(sizes: Sizes, rows: int, kind: str, dtype: torch.dtype, bias: bool) -> None:
    n, k = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden
    problem = Problem(n, k, rows, dtype, "cuda", bias=bias)
    linear, tile = tile_for(kind, problem, sizes.head_dim // 2)
    rotation, cache = problem.rotation(sizes), problem.cache(sizes)
    whole = torch.full((rows + 1, sizes.q_heads * sizes.head_dim), torch.nan, dtype=dtype, device="cuda")
    out = HeadOutput(whole[:rows], cache, LAYER, rotation)
    qkv_launch(stream(problem.x), linear, EPS, out, tile, problem.counters)
    expected_q, expected_cache = problem.expected_qkv(sizes, rotation)
    assert_near(whole[:rows], expected_q, dtype, roundings=2)
    # Only the pages of its tokens: elsewhere both are NaN.
    assert_near(cache, expected_cache, dtype, roundings=2)
    assert whole[rows:].isnan().all()
    assert not problem.counters.any()


# Heads that the tile does not divide; heads that are normalised.
TWO_KERNELS = [
    (Sizes(512, 4, 2, 96, 768), False),
    (Sizes(512, 4, 2, 80, 768), True),
    (Sizes(512, 4, 1, 128, 768), True),
]


@each_bias
@each_dtype
@each_kind
@pytest.mark.parametrize("rows", [5, 16, 64])
@pytest.mark.parametrize(("sizes", "is_normed"), TWO_KERNELS, ids=str)
def test_qkv_with_a_second_kernel_for_heads(
    sizes: Sizes, is_normed: bool, rows: int, kind: str, dtype: torch.dtype, bias: bool
) -> None:
    n, k = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden
    problem = Problem(n, k, rows, dtype, "cuda", bias=bias)
    linear, tile = tile_for(kind, problem, 0)
    rotation, cache = problem.rotation(sizes), problem.cache(sizes)
    norms = (problem.random(sizes.head_dim), problem.random(sizes.head_dim)) if is_normed else None
    q = torch.full((rows, sizes.q_heads * sizes.head_dim), torch.nan, dtype=dtype, device="cuda")
    out = HeadOutput(q, cache, LAYER, rotation, norms)
    qkv_launch(stream(problem.x), linear, EPS, out, tile, problem.counters)
    expected_q, expected_cache = problem.expected_qkv(sizes, rotation, norms)
    # The product is rounded once more on its way to the second.
    for mine, expected in ((q, expected_q), (cache, expected_cache)):
        assert_near(mine, expected, dtype, roundings=2)
    assert not problem.counters.any()


@pytest.mark.parametrize("kind", ["gemv", "wgmma, slices"])
def test_the_same_every_time(kind: str) -> None:
    problem = Problem(2048, 8192, 16, torch.bfloat16, "cuda")
    start = problem.random(16, 2048)
    results = []
    for _ in range(20):
        h = start.clone()
        add_launch(stream(h), problem.x, *tile_for(kind, problem, 0), problem.counters)
        results.append(h)
    assert all(torch.equal(result, results[0]) for result in results)


HEAD_TILES = {kind: tile for kind, (tile, slices) in TILES.items() if slices == 1}
HEAD_TILES |= {"wgmma, two groups of warps": Tile("wgmma", 128, 64, 8, 4)}


@pytest.mark.parametrize("given", [0.0, 0.8, None], ids=["greedy", "drawn", "both"])
@each_dtype
@pytest.mark.parametrize("kind", HEAD_TILES)
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 100])
def test_head_draws_from_the_logits_that_it_would_write(
    rows: int, kind: str, dtype: torch.dtype, given: float | None
) -> None:
    n, k = 4096, 640
    tile = HEAD_TILES[kind]
    if (tile.kind == "wgmma" and rows < 9) or (tile.kind == "gemv" and rows > 32):
        pytest.skip("wgmma wants many rows, gemv few")
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn((rows, k), generator=generator), torch.randn((n, k), generator=generator) * k**-0.5
    x, w = x.to(dtype).cuda(), w.to(dtype).cuda()
    number = torch.arange(rows, device="cuda")
    temperature = torch.full((rows,), given, device="cuda") if given is not None else (number % 2) * 0.7
    slots = number.flip(0)
    metadata = sample.SamplingMetadata(
        slots, (number + 9).int(), temperature.float(), number * 7 + (1 << 40), number % 2, number % 5
    )
    logits = head.logits_launch(x, Affine(w), tile)
    torch.testing.assert_close(logits.double().cpu(), x.double().cpu() @ w.double().cpu().T, rtol=1e-4, atol=1e-4)
    ids = head.sample_launch(x, Affine(w), metadata, tile)
    assert torch.equal(ids, sample.reference(logits, metadata))


def test_head_says_which_rows_are_not_finite() -> None:
    x, w = torch.randn(12, 512, device="cuda").bfloat16(), torch.randn(2048, 512, device="cuda").bfloat16()
    x[3, 7], x[5, 0] = torch.nan, torch.inf
    zeros, slots = torch.zeros(12, dtype=torch.int64, device="cuda"), torch.arange(12, device="cuda")
    temperature = torch.tensor([0.0, 0.9] * 6, device="cuda")
    ids = head.sample_launch(
        x, Affine(w), sample.SamplingMetadata(slots, zeros, temperature, zeros, zeros, zeros), HEAD_TILES["gemv"]
    )
    assert [row for row, number in enumerate(ids.tolist()) if number == sample.INVALID] == [3, 5]
