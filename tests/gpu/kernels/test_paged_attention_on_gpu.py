"""Paged attention on CUDA: against float64 over dense keys, against the reference at real sizes, and in a padded graph.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels import TORCH, TRITON, AttentionMetadata
from photon_grpc.kernels.attention import triton_decode, write_kv
from tests.kernels.paged import Shape, attend, expected, paged_batch, tolerance

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_block_size = pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
# (query heads, key heads, head size)
HEADS = [(32, 8, 64), (32, 8, 128), (4, 2, 64), (6, 2, 96), (7, 1, 32)]


@each_block_size
@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mixed_rows_equal_dense_attention(heads: tuple[int, int, int], dtype: torch.dtype, block_size: int) -> None:
    batch = paged_batch(Shape(*heads, block_size), [1, 40, 1, 3, 130], [270, 90, 1, 3, 200], dtype, "cuda")
    out = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(dtype))


@pytest.mark.parametrize("window", [1, 40, 64, 500])
@pytest.mark.parametrize("block_size", [8, 16, 64])
@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rows_with_a_window_equal_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, block_size: int, window: int
) -> None:
    counts, contexts = [1, 40, 1, 3, 130, 1], [270, 90, 1, 300, 1200, 900]
    batch = paged_batch(Shape(*heads, block_size), counts, contexts, dtype, "cuda", window=window)
    out = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(dtype))
    theirs = attend(TORCH, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(theirs.double().cpu(), expected(batch), **tolerance(dtype))


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("splits", [1, 2, 4, 16])
@each_dtype
def test_every_number_of_shares(dtype: torch.dtype, splits: int, window: int) -> None:
    contexts = [1, 63, 64, 65, 700, 2000]
    batch = paged_batch(Shape(8, 2, 128, 16), [1] * len(contexts), contexts, dtype, "cuda", window=window)
    out = torch.full(batch.q.shape, torch.nan, dtype=dtype, device="cuda")
    triton_decode.launch(batch.q, batch.cache, batch.layer, batch.meta, out, splits=splits)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(dtype))


@each_dtype
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_long_rows_equal_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    counts, contexts = [1] * 20 + [2048, 777], [4096, 1] + [272] * 18 + [2048, 4000]
    batch = paged_batch(Shape(*heads, 16), counts, contexts, dtype, "cuda")
    mine = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    theirs = attend(TORCH, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(mine, theirs, **tolerance(dtype))


def test_a_padded_graph_answers_like_eager_and_touches_block_0_alone() -> None:
    """One row of a bucket of four is padding: slot and page 0, context 1, NaN in block 0 before the replay."""
    shape, bucket = Shape(32, 8, 64, 16), 4
    batch = paged_batch(shape, [1, 1, 1], [70, 5, 300], torch.bfloat16, "cuda")
    tables = torch.zeros((bucket, batch.meta.block_tables.shape[1]), dtype=torch.int32, device="cuda")
    contexts = torch.ones(bucket, dtype=torch.int32, device="cuda")
    slots = torch.zeros(bucket, dtype=torch.int64, device="cuda")
    meta = AttentionMetadata(
        query_start=torch.arange(bucket + 1, dtype=torch.int32, device="cuda"),
        context_len=contexts,
        block_tables=tables,
        scale=batch.meta.scale,
        max_query_len=1,
        max_context_len=4096,
    )
    q, k, v = (torch.randn(bucket, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
    cache = batch.cache.clone()

    def body() -> torch.Tensor:
        write_kv.launch(k, v, cache, batch.layer, slots)
        return attend(TRITON, q, cache, batch.layer, meta)

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    cache.copy_(batch.cache)
    tables[:3], contexts[:3] = batch.meta.block_tables, batch.meta.context_len
    last = contexts[:3].long() - 1
    slots[:3] = tables[:3].gather(1, (last // 16).unsqueeze(1)).squeeze(1).long() * 16 + last % 16
    graph.replay()
    want_cache = batch.cache.clone()
    write_kv.reference(k[:3], v[:3], want_cache, batch.layer, slots[:3])
    torch.testing.assert_close(cache[1:], want_cache[1:], rtol=0, atol=0, equal_nan=True)
    want = attend(TORCH, q[:3], want_cache, batch.layer, batch.meta)
    torch.testing.assert_close(out[:3], want, **tolerance(torch.bfloat16))
