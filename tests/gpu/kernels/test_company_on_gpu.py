"""Numbers on CUDA to the last bit: of a row in any company, at every level, by every tile that computes a formula.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from photon_grpc.kernels import TRITON, norm_add, swiglu
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import embed, head, tiles
from photon_grpc.kernels.linear.fused_linear import Affine, Gate, qkv_launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.norm_add import Norm
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Norms, Rotation
from photon_grpc.kernels.sampling import sample, sample_filtered
from photon_grpc.kernels.sampling.histogram import Filters
from photon_grpc.kernels.swiglu import Activation
from tests.kernels.fused import EPS, LAYER, Sizes, stream
from tests.kernels.sampling import metadata_of, winning_values
from tests.runner.company import ROWS, alone, check_company, check_prompt_logprobs

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 7, 8, 64, 300)
#: A program takes a whole row of SwiGLU from 1,024 rows on.
NUM_TOKENS = 1100
# Llama-3.2-1B; Qwen2.5-0.5B's; 960 columns in 15 heads; heads of 128 with few of them.
SIZES = [
    Sizes(2048, 32, 8, 64, 8192),
    Sizes(896, 14, 2, 64, 4864, 64),
    Sizes(960, 15, 5, 64, 2560),
    Sizes(512, 4, 1, 128, 768),
]
TILES = {
    "gemv": Tile("gemv", 16, 64, 1, 4),
    "gemv, one warp": Tile("gemv", 32, 64, 1, 3),
    "gemv, two warps": Tile("gemv", 32, 128, 2, 3),
    "wgmma": Tile("wgmma", 64, 64, 4, 4),
    "wgmma, two groups of warps": Tile("wgmma", 128, 64, 8, 4),
}
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_tile = pytest.mark.parametrize("kind", TILES)
each_bias = pytest.mark.parametrize("bias", [False, True])


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_columns", [32000, 128256, 151936, 50257])
def test_a_row_gets_in_any_company_what_it_gets_alone(num_columns: int) -> None:
    logits = torch.randn(len(ROWS), num_columns, device="cuda") * 3
    expected = {number: alone(number, TRITON, logits) for number in range(len(ROWS))}
    draw = random.Random(num_columns)
    for _ in range(12):
        chosen = draw.sample(range(len(ROWS)), draw.randint(1, len(ROWS)))
        check_company(chosen, expected, TRITON, logits)


@pytest.mark.parametrize("num_columns", [32000, 128256, 151936])
def test_a_prompt_is_scored_as_it_would_be_while_it_is_generated(num_columns: int) -> None:
    check_prompt_logprobs(TRITON, torch.randn(133, num_columns, device="cuda") * 3, (70, 1, 62))


@each_dtype
@each_tile
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 100])
def test_every_kernel_divides_and_adds_noise_alike(rows: int, kind: str, dtype: torch.dtype) -> None:
    tile = TILES[kind]
    if (tile.kind == "wgmma" and rows < 9) or (tile.kind == "gemv" and rows > 32):
        pytest.skip("wgmma wants many rows, gemv few")
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 640, generator=generator), torch.randn(4096, 640, generator=generator) / 8
    x, w = x.to(dtype).cuda(), w.to(dtype).cuda()
    metadata = metadata_of(torch.arange(rows, device="cuda") % 5 * 0.3)
    filters = Filters(torch.full((rows,), -1), torch.ones(rows), torch.zeros(rows))
    logits = head.logits_launch(x, Affine(w), tile)
    unwritten = winning_values(lambda: head.sample_launch(x, Affine(w), metadata, tile))
    plain = winning_values(lambda: sample.launch(logits, metadata))
    filtered = winning_values(
        lambda: sample_filtered.launch(logits, metadata, Filters(*(each.cuda() for each in filters)))
    )
    assert torch.equal(unwritten, plain) and torch.equal(filtered, plain)


# -- row by row --------------------------------------------------------------------------------------------------------


def check_rows(compute: Callable[..., torch.Tensor], *columns: torch.Tensor) -> None:
    """Check that rows next to one another have the bits that they have among all."""
    whole = compute(*(column.clone() for column in columns))
    for count in COUNTS:
        for start in (0, 5, 513, len(whole) - count):
            part = compute(*(column[start : start + count].clone() for column in columns))
            assert torch.equal(part, whole[start : start + count]), (count, start)


def random_rows(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(NUM_TOKENS, size, device="cuda").to(dtype)


@each_dtype
@each_size
def test_norms(sizes: Sizes, dtype: torch.dtype) -> None:
    weight, narrow = random_rows(sizes.hidden, dtype)[0], random_rows(sizes.head_dim, dtype)[0]
    x, residual = random_rows(sizes.hidden, dtype), random_rows(sizes.hidden, dtype)
    check_rows(lambda x: TRITON.rms_norm(x, weight, EPS), x)
    check_rows(lambda x, residual: TRITON.add_rms_norm(x, residual, weight, EPS)[0], x, residual)
    heads = random_rows(sizes.q_heads * sizes.head_dim, dtype).view(NUM_TOKENS, -1, sizes.head_dim)
    check_rows(lambda x: TRITON.rms_norm(x, narrow, EPS), heads)
    # The sum of the two kernels is the same, whether the residual stream was added before or in the kernel.
    added, total = TRITON.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(TRITON.rms_norm(total, weight, EPS), added)


@each_dtype
@each_size
def test_embedding_and_swiglu(sizes: Sizes, dtype: torch.dtype) -> None:
    table, ids = random_rows(sizes.hidden, dtype), torch.randint(0, NUM_TOKENS, (NUM_TOKENS,), device="cuda")

    def embedded(ids: torch.Tensor) -> torch.Tensor:
        h = torch.empty(len(ids), sizes.hidden, dtype=dtype, device="cuda")
        partial = torch.empty(len(ids), sizes.hidden // squares.GROUP, device="cuda")
        embed.launch(table, ids, h, partial)
        return torch.cat((h.float(), partial), dim=1)

    check_rows(embedded, ids)
    check_rows(TRITON.swiglu, random_rows(2 * sizes.intermediate, dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@each_bias
@each_dtype
@each_size
def test_swiglu_after_a_product(sizes: Sizes, dtype: torch.dtype, bias: bool, activation: Activation) -> None:
    b = random_rows(2 * sizes.intermediate, dtype)[0].contiguous() if bias else None

    def product(gate_up: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(h), sizes.intermediate, dtype=dtype, device="cuda")
        swiglu.norm_launch(gate_up, h, b, EPS, y, activation)
        return y

    check_rows(product, random_rows(2 * sizes.intermediate, dtype), random_rows(sizes.hidden, dtype))


@each_bias
@each_dtype
@each_size
def test_the_norm_of_a_product_is_added(sizes: Sizes, dtype: torch.dtype, bias: bool) -> None:
    b = random_rows(sizes.hidden, dtype)[0].contiguous() if bias else None
    norm = Norm(torch.randn(sizes.hidden, device="cuda"), EPS)

    def added(y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h, partial = h.clone(), torch.empty(len(h), sizes.hidden // squares.GROUP, device="cuda")
        norm_add.launch(y, b, norm, h, partial)
        return torch.cat((h.float(), partial), dim=1)

    check_rows(added, random_rows(sizes.hidden, dtype), random_rows(sizes.hidden, dtype))


@pytest.mark.parametrize("is_normed", [False, True])
@each_bias
@each_dtype
@each_size
def test_heads_after_a_product(sizes: Sizes, dtype: torch.dtype, bias: bool, is_normed: bool) -> None:
    width = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim
    b = random_rows(width, dtype)[0].contiguous() if bias else None
    norms = norms_of(sizes, dtype) if is_normed else None

    def heads(qkv: torch.Tensor, h: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = output_of(sizes, positions, dtype, norms)
        rotate_store.launch(qkv, h, b, EPS, out)
        return everything(out)

    positions = torch.randint(0, 64, (NUM_TOKENS,), device="cuda")
    check_rows(heads, random_rows(width, dtype), random_rows(sizes.hidden, dtype), positions)


def norms_of(sizes: Sizes, dtype: torch.dtype) -> Norms:
    query, key = random_rows(sizes.head_dim, dtype)[:2].clone()
    return query.contiguous(), key.contiguous()


def output_of(sizes: Sizes, positions: torch.Tensor, dtype: torch.dtype, norms: Norms | None) -> HeadOutput:
    """Return room for the heads of tokens whose keys and values lie one after the other."""
    rows, angles = len(positions), torch.linspace(0, 6, 64 * (sizes.head_dim // 2), device="cuda").view(64, -1)
    rotation = Rotation(angles.cos(), angles.sin(), positions, torch.arange(rows, device="cuda"))
    shape = (-(-rows // sizes.block_size), 3, 2, sizes.kv_heads, sizes.block_size, sizes.head_dim)
    q = torch.zeros(rows, sizes.q_heads * sizes.head_dim, dtype=dtype, device="cuda")
    return HeadOutput(q, torch.zeros(shape, dtype=dtype, device="cuda"), LAYER, rotation, norms)


def everything(out: HeadOutput) -> torch.Tensor:
    """Return queries, keys and values of each token."""
    stored = out.cache[:, LAYER].permute(0, 3, 1, 2, 4).flatten(0, 1)[: len(out.q)]
    return torch.cat((out.q, stored.flatten(1)), dim=1)


# -- the ends of products ----------------------------------------------------------------------------------------------


def exact(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [rows, k] with memory for its bucket, W [n, k] and x Wᵀ, of integers that no order of sums rounds."""
    x = torch.randint(-1, 2, (tiles.bucket(rows) or rows, k), device="cuda").bfloat16()[:rows]
    w = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    w.scatter_(1, torch.randint(0, k, (n, 100), device="cuda"), 1.0)
    return x, w, (x.float() @ w.float().T).bfloat16()


def tile_for(kind: str, n: int, k: int, rows: int, span: int) -> Tile:
    tile, bucket = TILES[kind], tiles.bucket(rows)
    assert bucket is not None
    if (tile.kind == "wgmma" and bucket < 16) or not tiles.fits(tile, tiles.Problem(n, k, bucket, span)):
        pytest.skip("the tile does not divide the shape")
    return tile


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@each_bias
@each_tile
@pytest.mark.parametrize("rows", [5, 16, 100])
@each_size
def test_swiglu_of_a_tile_is_that_after_a_product(
    sizes: Sizes, rows: int, kind: str, bias: bool, activation: Activation
) -> None:
    n, k = 2 * sizes.intermediate, sizes.hidden
    tile, (x, w, product) = tile_for(kind, n, k, rows, sizes.intermediate), exact(rows, n, k)
    b = torch.randn(n, device="cuda").bfloat16() if bias else None
    mine, theirs = torch.empty(2, rows, sizes.intermediate, dtype=torch.bfloat16, device="cuda")
    counters = torch.zeros(n // 16, dtype=torch.int32, device="cuda")
    swiglu_launch(stream(x), Affine(w, b), Gate(EPS, activation), mine, tile, counters)
    swiglu.norm_launch(product, x, b, EPS, theirs, activation)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("bias", "is_normed"), [(False, False), (True, False), (False, True)])
@each_tile
@pytest.mark.parametrize("rows", [5, 16, 100])
@each_size
def test_heads_of_a_tile_are_those_after_a_product(
    sizes: Sizes, rows: int, kind: str, bias: bool, is_normed: bool
) -> None:
    n, k = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden
    tile = tile_for(kind, n, k, rows, 0 if is_normed else sizes.head_dim // 2)
    x, w, product = exact(rows, n, k)
    b, positions = (torch.randn(n, device="cuda").bfloat16() if bias else None), torch.arange(rows, device="cuda") % 64
    norms = norms_of(sizes, torch.bfloat16) if is_normed else None
    mine, theirs = (output_of(sizes, positions, torch.bfloat16, norms) for _ in range(2))
    counters = torch.zeros(n // 16, dtype=torch.int32, device="cuda")
    qkv_launch(stream(x), Affine(w, b), EPS, mine, tile, counters)
    rotate_store.launch(product, x, b, EPS, theirs)
    assert torch.equal(everything(mine), everything(theirs))
