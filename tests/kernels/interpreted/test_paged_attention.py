"""Paged attention kernels in the interpreter against attention in float64 over the same tokens in plain order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.kernels import select
from photon_grpc.kernels.attention import triton_decode
from tests.examples import examples
from tests.kernels.paged import PagedBatch, Shape, attend, expected, paged_batch, tolerance

TRITON = select("triton", "cpu")


def check(batch: PagedBatch, out: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected(batch), **tolerance(batch.q.dtype))


@pytest.mark.each_value
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_and_prompts_at_every_block_size(block_size: int, dtype: torch.dtype) -> None:
    batch = paged_batch(Shape(4, 2, 32, block_size), [1, 40, 1, 3], [70, 90, 1, 3], dtype, seed=block_size)
    check(batch, attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta))


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(8, 2, 64), (6, 2, 96), (7, 1, 32), (2, 2, 128)])
def test_groups_and_head_sizes(q_heads: int, kv_heads: int, head_dim: int) -> None:
    batch = paged_batch(Shape(q_heads, kv_heads, head_dim, 16), [5, 1, 33], [50, 33, 40])
    check(batch, attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta))


def shared(batch: PagedBatch, splits: int) -> torch.Tensor:
    out = torch.full(batch.q.shape, torch.nan)
    triton_decode.launch(batch.q, batch.cache, batch.layer, batch.meta, out, splits=splits)
    return out


@pytest.mark.parametrize("window", [0, 300])
def test_a_row_has_the_same_bits_however_many_programs_share_it(window: int) -> None:
    batch = paged_batch(Shape(4, 2, 32, 16), [1, 1, 1], [1, 530, 65], window=window)
    out = shared(batch, 1)
    check(batch, out)
    # The longest row has three lanes.
    for splits in (2, 8):
        torch.testing.assert_close(shared(batch, splits), out, rtol=0, atol=0)


def test_a_row_has_the_same_bits_beside_any_other_and_under_any_bound_of_the_host() -> None:
    batch = paged_batch(Shape(4, 2, 32, 16), [1, 1, 9], [300, 77, 600])
    together = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    for row, queries in enumerate((slice(0, 1), slice(1, 2), slice(2, 11))):
        count = queries.stop - queries.start
        meta = dataclasses.replace(
            batch.meta,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_len=batch.meta.context_len[row : row + 1],
            block_tables=batch.meta.block_tables[row : row + 1],
            max_query_len=count,
            min_query_len=count,
            max_context_len=4096,
        )
        alone = attend(TRITON, batch.q[queries], batch.cache, batch.layer, meta)
        torch.testing.assert_close(alone, together[queries], rtol=0, atol=0)


@pytest.mark.each_value
@pytest.mark.parametrize("window", [1, 21, 64])
@pytest.mark.parametrize("block_size", [8, 64])
def test_keys_behind_the_window_are_not_read(block_size: int, window: int) -> None:
    batch = paged_batch(Shape(4, 2, 32, block_size), [1, 40, 1, 3, 1], [170, 190, 1, 80, 33], window=window)
    check(batch, attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta))


@settings(max_examples=examples(8))
@given(
    st.sampled_from([8, 16, 64]),
    st.lists(st.tuples(st.sampled_from([1, 1, 2, 9, 35]), st.integers(0, 80)), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_any_mix_of_rows(block_size: int, rows: list[tuple[int, int]], seed: int) -> None:
    counts = [count for count, _ in rows]
    contexts = [count + before for count, before in rows]
    batch = paged_batch(Shape(2, 1, 32, block_size), counts, contexts, seed=seed)
    check(batch, attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta))


@pytest.mark.parametrize(("pairs", "lanes", "splits"), [(8, 2, 2), (8, 16, 16), (256, 16, 2), (512, 16, 1), (64, 1, 1)])
def test_programs_fill_the_device_and_none_is_without_a_lane(pairs: int, lanes: int, splits: int) -> None:
    assert triton_decode.num_splits(pairs, lanes, 132) == splits
    assert [triton_decode.lanes_in_sight(keys, 0, 256) for keys in (1, 256, 257)] == [1, 1, 2]
    assert [triton_decode.lanes_in_sight(9999, window, 256) for window in (1, 256, 257)] == [2, 2, 3]
