"""Hopper's prompt attention against float64 over dense keys, alone and in a batch, and in a graph with lengths as data.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from photon_grpc.kernels import TRITON, AttentionMetadata
from photon_grpc.kernels.attention import gluon_decode, hopper_varlen
from photon_grpc.kernels.attention.dispatch import KernelAttention
from photon_grpc.kernels.attention.spec import AttentionSpec
from tests.kernels.paged import PagedBatch, Shape, attend, expected, paged_batch, tolerance

pytestmark = pytest.mark.gpu
HEADS = [(32, 8, 64), (32, 8, 128), (8, 8, 64), (16, 2, 128), (15, 5, 64), (28, 4, 128), (8, 4, 256), (4, 1, 256)]
each_heads = pytest.mark.parametrize(
    ("heads", "consumers"), [(heads, found) for heads in HEADS for of, found in hopper_varlen.STAGES if of == heads[2]]
)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is Hopper's")


def by_hopper(batch: PagedBatch, consumers: int) -> torch.Tensor:
    out = torch.full(batch.q.shape, torch.nan, dtype=batch.q.dtype, device="cuda")
    hopper_varlen.launch(batch.q, batch.cache, batch.layer, batch.meta, out, consumers=consumers)
    return out


@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_heads
def test_rows_of_several_queries_equal_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, block_size: int, consumers: int
) -> None:
    counts, contexts = [1, 40, 1, 3, 130, 2, 0, 49], [270, 90, 1, 3, 200, 129, 7, 320]
    batch = paged_batch(Shape(*heads, block_size), counts, contexts, dtype, "cuda")
    out = by_hopper(batch, consumers)
    several = torch.tensor([n > 1 for n in counts]).repeat_interleave(torch.tensor(counts))
    torch.testing.assert_close(out.double().cpu()[several], expected(batch)[several], **tolerance(dtype))
    assert out[~several.cuda()].isnan().all()


@pytest.mark.parametrize("window", [1, 100, 512])
@pytest.mark.parametrize("block_size", [16, 64])
@each_heads
def test_windows_equal_dense_attention(
    heads: tuple[int, int, int], consumers: int, block_size: int, window: int
) -> None:
    counts = [40, 3, 130, 2, 49, 200, 30]
    contexts = [window + 40, 3, 2 * window + 131, window + 1, 2320, 200, 3000]
    batch = paged_batch(Shape(*heads, block_size), counts, contexts, torch.bfloat16, "cuda", window=window)
    out = by_hopper(batch, consumers)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(torch.bfloat16))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("block_size", [8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each_heads
def test_pages_of_8_bits_equal_dense_attention(
    heads: tuple[int, int, int], consumers: int, dtype: torch.dtype, block_size: int, window: int
) -> None:
    if (heads[2], consumers) not in hopper_varlen.REGISTERS_OF_8_BITS:
        pytest.skip("registers have no room for as many consumers")
    counts, contexts = [40, 3, 130, 2, 49, 200, 30], [140, 3, 331, 101, 2320, 200, 1200]
    batch = paged_batch(Shape(*heads, block_size), counts, contexts, dtype, "cuda", window=window, in_8_bits=True)
    out = by_hopper(batch, consumers)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(dtype))


@pytest.mark.parametrize("window", [0, 100])
@each_heads
def test_a_row_is_the_same_to_the_bit_alone_and_in_a_batch_however_shared(
    heads: tuple[int, int, int], consumers: int, window: int
) -> None:
    batch = paged_batch(Shape(*heads, 64), [37, 200, 90], [101, 200, 515], torch.bfloat16, "cuda", window=window)
    together = by_hopper(batch, consumers)
    starts = batch.meta.query_start.tolist()
    for row in range(3):
        queries = slice(starts[row], starts[row + 1])
        meta = replace(
            batch.meta,
            query_start=torch.tensor([0, starts[row + 1] - starts[row]], dtype=torch.int32, device="cuda"),
            context_len=batch.meta.context_len[row : row + 1],
            block_tables=batch.meta.block_tables[row : row + 1],
        )
        alone = by_hopper(replace(batch, q=batch.q[queries], meta=meta), min(2, consumers))
        torch.testing.assert_close(alone, together[queries], rtol=0, atol=0)


def test_a_graph_follows_lengths_that_change() -> None:
    shape = Shape(32, 8, 128, 64)
    first = paged_batch(shape, [300, 212], [300, 600], torch.bfloat16, "cuda")
    second = paged_batch(shape, [64, 448], [320, 460], torch.bfloat16, "cuda", seed=1)
    pages = max(batch.meta.block_tables.shape[1] for batch in (first, second))
    blocks = max(batch.cache.shape[0] for batch in (first, second))
    cache = torch.zeros((blocks, *first.cache.shape[1:]), dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros((2, pages), dtype=torch.int32, device="cuda")
    starts, contexts = first.meta.query_start.clone(), first.meta.context_len.clone()
    meta = AttentionMetadata(starts, contexts, tables, first.meta.scale, max_query_len=512, max_context_len=4096)
    q = torch.empty((512, 32, 128), dtype=torch.bfloat16, device="cuda")
    slots = torch.zeros(512, dtype=torch.int64, device="cuda")
    chosen = TRITON.attention(AttentionSpec(32, meta.scale, q.dtype), meta, cache, slots)
    assert isinstance(chosen, KernelAttention)
    assert chosen.launches[0].func is hopper_varlen.launch

    def load(batch: PagedBatch) -> None:
        q.copy_(batch.q)
        cache[: batch.cache.shape[0]].copy_(batch.cache)
        tables[:, : batch.meta.block_tables.shape[1]].copy_(batch.meta.block_tables)
        starts.copy_(batch.meta.query_start)
        contexts.copy_(batch.meta.context_len)

    load(first)
    attend(TRITON, q, cache, 1, meta)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(TRITON, q, cache, 1, meta)
    for batch in (second, first):
        load(batch)
        graph.replay()
        torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(torch.bfloat16))


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("count", [9, 20, 64, 127, 128])
@pytest.mark.parametrize("heads", [(32, 8, 64), (32, 8, 128), (8, 8, 64), (15, 5, 64)])
def test_a_short_prompt_alone_is_the_same_to_the_bit_by_the_decode_kernel(
    heads: tuple[int, int, int], count: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_decode, "MAX_LONE_PAIRS", dict.fromkeys(gluon_decode.HEAD_DIMS, 1 << 20))
    consumers = min(found for head_dim, found in hopper_varlen.STAGES if head_dim == heads[2])
    for context in (count, count + 1, count + 300, count + 5000):
        batch = paged_batch(Shape(*heads, 64), [count], [context], torch.bfloat16, "cuda", window=window)
        assert gluon_decode.takes(batch.meta, heads[0], heads[2])
        alone = torch.full_like(batch.q, torch.nan)
        counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
        gluon_decode.launch_short_rows(batch.q, batch.cache, batch.layer, batch.meta, alone, counters=counters)
        assert torch.equal(alone, by_hopper(batch, consumers))
        assert not counters.any()
