"""Pages of 8 bits in the interpreter: the same bytes as torch's, and attention over them as in float64.

The interpreter casts NaN to 384, so NaN is tested on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import select
from photon_grpc.kernels.attention import triton_decode, write_kv
from photon_grpc.kernels.lang.page_scales import PageScales
from photon_grpc.kernels.rotary import rotate_store
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Rotation
from tests.kernels.paged import Shape, attend, expected, paged_batch, random_scales, tolerance

TRITON = select("triton", "cpu")


@pytest.mark.each_value
@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_and_prompts(block_size: int, dtype: torch.dtype, window: int) -> None:
    counts, contexts = [1, 40, 1, 3], [270, 90, 1, 3]
    batch = paged_batch(Shape(4, 2, 32, block_size), counts, contexts, dtype, window=window, in_8_bits=True)
    out = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(out.double(), expected(batch), **tolerance(dtype))


def test_programs_that_share_a_row_scale_its_values_once() -> None:
    batch = paged_batch(Shape(4, 2, 32, 16), [1, 1, 1], [1, 700, 65], in_8_bits=True)
    outs = torch.full((2, *batch.q.shape), torch.nan)
    for splits, out in zip((1, 3), outs, strict=True):
        triton_decode.launch(batch.q, batch.cache, batch.layer, batch.meta, out, splits=splits)
    torch.testing.assert_close(outs[0].double(), expected(batch), **tolerance(torch.float32))
    assert torch.equal(outs[0], outs[1])


#: Of every kind: halfway between two numbers, subnormal, below all of them, at the end of the range, beyond it, none.
ODD = [1.0625, 1.1875, -(2.0**-9), 2.0**-10, 1.5 * 2.0**-9, 0.0, -0.0, 440.0, 448.0, 463.9, -464.0, 1e9, torch.inf]


def scales_of(kv_heads: int, head_dim: int) -> PageScales:
    generator = torch.Generator().manual_seed(5)
    found = random_scales(kv_heads, generator)[0]
    return found._replace(offset=torch.randn(kv_heads, head_dim, generator=generator))


@pytest.mark.parametrize(("kv_heads", "size", "block_size"), [(2, 32, 8), (3, 96, 16)])
def test_write_kv_writes_and_counts_what_torch_does(kv_heads: int, size: int, block_size: int) -> None:
    projection = 20 * torch.randn(6, 3 * kv_heads, size)
    k, v = projection[:, kv_heads : 2 * kv_heads], projection[:, 2 * kv_heads :]
    scales = scales_of(kv_heads, size)
    # Of values, which have no offset to round them.
    v[:, 0, : len(ODD)] = torch.tensor(ODD) * scales.scales[1, 0]
    slots = torch.randperm(4 * block_size)[:6] + block_size
    slots[0] = 1  # padding
    pages = torch.zeros(2, 5, 2, 2, kv_heads, block_size, size).to(torch.float8_e4m3fn)
    counts = []
    for cache, write in zip(pages, (write_kv.launch, write_kv.reference), strict=True):
        counted = scales._replace(saturated=torch.zeros(1, dtype=torch.int64))
        write(k, v, cache, 1, slots, counted)
        counts.append(counted.saturated.item())
    mine, theirs = pages.view(torch.uint8)
    assert torch.equal(mine, theirs)
    beyond = (torch.stack((k - scales.offset, v), 1) * scales.inverse[..., None]).abs() > 448
    assert counts == [beyond[1:].sum().item()] * 2 and counts[0] >= 5 * 4


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_store_writes_what_torch_does(has_norms: bool, dtype: torch.dtype) -> None:
    q_heads, kv_heads, size = 6, 3, 96
    qkv = torch.randn(4, (q_heads + 2 * kv_heads) * size).to(dtype)
    norms = (torch.randn(size).to(dtype), torch.randn(size).to(dtype)) if has_norms else None
    positions, slots = torch.tensor([0, 49, 7, 7]), torch.tensor([8, 17, 39, 3])
    rotation = Rotation(torch.randn(50, size // 2), torch.randn(50, size // 2), positions, slots)
    results, counts = [], []
    for store in (rotate_store.launch, rotate_store.reference):
        scales = scales_of(kv_heads, size)
        scales.set(scales.scales / 60)
        q = torch.full((4, q_heads * size), torch.nan, dtype=dtype)
        cache = torch.zeros((5, 2, 2, kv_heads, 8, size)).to(torch.float8_e4m3fn)
        store(qkv, None, None, 1e-5, HeadOutput(q, cache, 1, rotation, norms, scales))
        results.append(cache.float())
        counts.append(scales.saturated.item())
    mine, theirs = results
    # Sums round in another order, so that a number near the middle of two may be the other one.
    torch.testing.assert_close(mine, theirs, rtol=0.13, atol=2**-8)
    assert (mine != theirs).float().mean() < 0.005
    assert counts[0] > 0 and abs(counts[0] - counts[1]) <= 2
