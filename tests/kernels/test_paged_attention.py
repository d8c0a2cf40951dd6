"""The torch reference of paged attention against attention in float64 over the same tokens in plain order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.kernels import select
from photon_grpc.kernels.attention import write_kv
from photon_grpc.kernels.attention.torch_attention import MAX_GATHER_BYTES, GatherPlan
from tests.examples import examples
from tests.kernels.paged import PagedBatch, Shape, attend, expected, paged_batch, tolerance

kernels = select("torch", "cpu")


def answer(batch: PagedBatch) -> torch.Tensor:
    return attend(kernels, batch.q, batch.cache, batch.layer, batch.meta)


shapes = st.builds(
    lambda kv_heads, group, head_dim, block_size: Shape(kv_heads * group, kv_heads, head_dim, block_size),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([32, 64, 96, 128]),
    st.sampled_from([8, 16, 64]),
)
# (queries, keys before them) of a row; more than 32 queries are several tiles.
rows = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5, 33, 70]), st.integers(0, 90)), min_size=1, max_size=6)


#: Of one key, within a page and a tile of queries, of some pages, of more keys than most rows have; 0 is none.
windows = st.sampled_from([0, 0, 1, 5, 32, 40, 100])


@settings(max_examples=examples(90))
@given(shapes, rows, st.integers(0, 99), windows)
def test_any_mix_of_rows_equals_dense_attention(
    shape: Shape, rows: list[tuple[int, int]], seed: int, window: int
) -> None:
    counts = [count for count, _ in rows]
    contexts = [count + before for count, before in rows]
    batch = paged_batch(shape, counts, contexts, seed=seed, window=window)
    torch.testing.assert_close(answer(batch).double(), expected(batch), **tolerance(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_float32_sums(dtype: torch.dtype) -> None:
    batch = paged_batch(Shape(8, 2, 64, 16), [1, 40, 1], [300, 100, 17], dtype)
    torch.testing.assert_close(answer(batch).double(), expected(batch), **tolerance(dtype))


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    shape = Shape(4, 2, 64, 16)
    batch = paged_batch(shape, [1, 1, 1, 9], [30, 200, 77, 50])
    together = answer(batch)
    starts = batch.meta.query_start.tolist()
    for row in range(4):
        meta = type(batch.meta)(
            query_start=torch.tensor([0, starts[row + 1] - starts[row]], dtype=torch.int32),
            context_len=batch.meta.context_len[row : row + 1],
            block_tables=batch.meta.block_tables[row : row + 1],
            scale=batch.meta.scale,
            max_query_len=9,
            max_context_len=200,
        )
        queries = slice(starts[row], starts[row + 1])
        alone = attend(kernels, batch.q[queries], batch.cache, batch.layer, meta)
        torch.testing.assert_close(alone, together[queries], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("contexts", [[20] * 8, [20] * 7 + [600], [4000] * 3], ids=["together", "ragged", "long"])
def test_decode_rows_gathered_together_or_alone_give_the_same(contexts: list[int]) -> None:
    batch = paged_batch(Shape(4, 2, 64, 16), [1] * len(contexts), contexts)
    plan = GatherPlan(batch.meta, batch.cache, batch.q.dtype)
    padded_bytes = 2 * len(contexts) * max(contexts) * 2 * 64 * 4
    assert plan.covers_all == (padded_bytes <= MAX_GATHER_BYTES and max(contexts) == min(contexts))
    torch.testing.assert_close(answer(batch).double(), expected(batch), **tolerance(torch.float32))


def test_empty_rows_are_passed_over() -> None:
    batch = paged_batch(Shape(4, 2, 64, 16), [2, 0, 1], [5, 3, 9])
    torch.testing.assert_close(answer(batch).double(), expected(batch), **tolerance(torch.float32))


@pytest.mark.parametrize("counts", [[1, 1], [2, 1], [2, 3]])
def test_queries_that_belong_to_no_row_are_passed_over(counts: list[int]) -> None:
    batch = paged_batch(Shape(4, 2, 64, 16), counts, [5, 9])
    padded = torch.nn.functional.pad(batch.q, (0, 0, 0, 0, 0, 3), value=torch.nan)
    out = attend(kernels, padded, batch.cache, batch.layer, batch.meta)
    assert out.shape == padded.shape
    torch.testing.assert_close(out[:-3].double(), expected(batch), **tolerance(torch.float32))


def test_keys_written_a_chunk_at_a_time_answer_like_one_prompt() -> None:
    shape = Shape(4, 2, 32, 8)
    whole = paged_batch(shape, [50], [50])
    cache = torch.full_like(whole.cache, torch.nan)
    parts = []
    for start, stop in ((0, 20), (20, 21), (21, 50)):
        at = torch.arange(start, stop)
        slots = whole.meta.block_tables[0].long()[at // 8] * 8 + at % 8
        write_kv.reference(whole.keys[0][start:stop], whole.values[0][start:stop], cache, 1, slots)
        meta = type(whole.meta)(
            query_start=torch.tensor([0, stop - start], dtype=torch.int32),
            context_len=torch.tensor([stop], dtype=torch.int32),
            block_tables=whole.meta.block_tables,
            scale=whole.meta.scale,
            max_query_len=stop - start,
            max_context_len=stop,
        )
        parts.append(attend(kernels, whole.q[start:stop], cache, 1, meta))
    torch.testing.assert_close(torch.cat(parts).double(), expected(whole), **tolerance(torch.float32))
