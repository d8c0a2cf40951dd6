"""Pages of 8 bits on CUDA: every way to write them gives the same bytes, and attention over them is that in float64.

python -m pytest -m gpu tests/gpu/kernels/test_page_scales_on_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import TRITON
from photon_grpc.kernels.attention import write_kv
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE, PageScales
from photon_grpc.kernels.linear import fused_linear
from photon_grpc.kernels.linear.fused_linear import Affine
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from tests.gpu.kernels.test_company_on_gpu import (
    LAYER,
    SIZES,
    TILES,
    exact,
    norms_of,
    output_of,
    stream,
    tile_for,
)
from tests.kernels.fused import EPS, Sizes
from tests.kernels.paged import Shape, attend, expected, paged_batch, tolerance

pytestmark = pytest.mark.gpu
MIXED = [1, 40, 1, 3, 700, 1], [270, 90, 1, 3, 2000, 5000]
DECODE = [1] * 9, [1, 64, 65, 1024, 1025, 272, 8192, 33, 4000]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [0, 512])
@pytest.mark.parametrize("rows", [MIXED, DECODE], ids=["mixed", "decode"])
@pytest.mark.parametrize(
    "shape", [Shape(32, 8, 64, 16), Shape(32, 8, 128, 64), Shape(14, 2, 64, 64), Shape(4, 1, 256, 64)]
)
def test_attention_is_that_over_the_values_of_the_pages(
    shape: Shape, rows: tuple[list[int], list[int]], window: int, dtype: torch.dtype
) -> None:
    batch = paged_batch(shape, *rows, dtype, "cuda", window=window, in_8_bits=True)
    out = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(dtype))


@pytest.mark.parametrize("shape", [Shape(32, 8, 64, 64), Shape(32, 8, 128, 64), Shape(8, 4, 256, 64)])
def test_prompts_are_the_same_every_time(shape: Shape) -> None:
    """Sums of a row in thousands were lost where a barrier shared the memory of their exchange."""
    counts = [40, 345, 2044, 600, 100, 347, 2000, 1300, 1400]
    batch = paged_batch(shape, counts, counts, torch.bfloat16, "cuda", in_8_bits=True)
    first = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(2000):
        again = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
        differ += (again.view(torch.int16) != first.view(torch.int16)).any()
    assert differ == 0


def scales_of(kv_heads: int, head_dim: int, factor: float = 1.0) -> PageScales:
    scales = PageScales.ones(kv_heads, torch.zeros(1, dtype=torch.int64, device="cuda"), head_dim)
    generator = torch.Generator().manual_seed(kv_heads)
    offset = torch.randn((kv_heads, head_dim), generator=generator)
    scales.set(factor * (0.02 + 0.1 * torch.rand((2, kv_heads), generator=generator)).cuda(), offset.cuda())
    return scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_write_kv_writes_and_counts_what_torch_does(dtype: torch.dtype) -> None:
    k, v = (40 * torch.randn(300, 8, 128, device="cuda")).to(dtype), torch.randn(300, 8, 128, device="cuda").to(dtype)
    # Every bit pattern of 16 bits, NaN among them.
    patterns = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).to(dtype)
    v[:64] = patterns.view(64, 8, 128)
    slots = torch.randperm(400, device="cuda")[:300]
    results, counts = [], []
    for write in (write_kv.launch, write_kv.reference):
        scales = scales_of(8, 128)
        cache = torch.zeros((7, 2, 2, 8, 64, 128), device="cuda").to(PAGE_DTYPE)
        write(k, v, cache, 1, slots, scales)
        results.append(cache[1:].float())
        counts.append(scales.saturated.item())
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert counts[0] == counts[1] > 0 and results[0].isnan().any()


def in_8_bits(out: HeadOutput, scales: PageScales) -> HeadOutput:
    cache = torch.zeros(out.cache.shape, device="cuda").to(PAGE_DTYPE)
    return out._replace(cache=cache, scales=scales)


def stored(out: HeadOutput) -> torch.Tensor:
    return out.cache[:, LAYER].view(torch.uint8)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize("rows", [5, 16, 100])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_heads_of_a_tile_are_those_after_a_product_and_those_of_torch(
    sizes: Sizes, rows: int, kind: str, is_normed: bool
) -> None:
    n, k = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden
    tile = tile_for(kind, n, k, rows, 0 if is_normed else sizes.head_dim // 2)
    x, w, product = exact(rows, n, k)
    positions = torch.arange(rows, device="cuda") % 64
    norms = norms_of(sizes, torch.bfloat16) if is_normed else None
    scales = [scales_of(sizes.kv_heads, sizes.head_dim, 0.2) for _ in range(3)]
    mine, theirs, plain = (in_8_bits(output_of(sizes, positions, torch.bfloat16, norms), each) for each in scales)
    counters = torch.zeros(n // 16, dtype=torch.int32, device="cuda")
    fused_linear.qkv_launch(stream(x), Affine(w), EPS, mine, tile, counters)
    rotate_store.launch(product, x, None, EPS, theirs)
    rotate_store.reference(product, x, None, EPS, plain)
    assert torch.equal(stored(mine), stored(theirs)) and torch.equal(mine.q, theirs.q)
    assert scales[0].saturated.item() == scales[1].saturated.item()
    near, far = (each.cache[:, LAYER].float() for each in (theirs, plain))
    # Sums round in another order, so that a number near the middle of two may be the other one.
    torch.testing.assert_close(near, far, rtol=0.13, atol=2**-8)
    assert (near != far).float().mean() < 0.01
