"""Paged attention kernels in the interpreter against attention in float64 over the same tokens in plain order."""

from __future__ import annotations

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


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_and_prompts_at_every_block_size(block_size: int, dtype: torch.dtype) -> None:
    batch = paged_batch(Shape(4, 2, 32, block_size), [1, 40, 1, 3], [70, 90, 1, 3], dtype, seed=block_size)
    check(batch, attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta))


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(8, 2, 64), (6, 2, 96), (7, 1, 32), (2, 2, 128)])
def test_groups_and_head_sizes(q_heads: int, kv_heads: int, head_dim: int) -> None:
    batch = paged_batch(Shape(q_heads, kv_heads, head_dim, 16), [5, 1, 33], [50, 33, 40])
    check(batch, attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta))


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_shares_of_the_keys_merge_also_where_some_are_empty(splits: int) -> None:
    batch = paged_batch(Shape(4, 2, 32, 16), [1, 1, 1], [1, 200, 65])
    out = torch.full(batch.q.shape, torch.nan)
    triton_decode.launch(batch.q, batch.cache, batch.layer, batch.meta, out, splits=splits)
    check(batch, out)


@pytest.mark.parametrize("window", [1, 21, 64])
@pytest.mark.parametrize("block_size", [8, 64])
def test_keys_behind_the_window_are_not_read(block_size: int, window: int) -> None:
    batch = paged_batch(Shape(4, 2, 32, block_size), [1, 40, 1, 3, 1], [170, 190, 1, 80, 33], window=window)
    check(batch, attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta))


@pytest.mark.parametrize("splits", [2, 8])
def test_shares_of_a_window_merge(splits: int) -> None:
    batch = paged_batch(Shape(4, 2, 32, 16), [1, 1, 1], [1, 200, 65], window=70)
    out = torch.full(batch.q.shape, torch.nan)
    triton_decode.launch(batch.q, batch.cache, batch.layer, batch.meta, out, splits=splits)
    check(batch, out)


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


@pytest.mark.parametrize(
    ("pairs", "context", "splits"), [(8, 272, 8), (8, 4096, 16), (256, 4096, 2), (512, 4096, 1), (64, 40, 2)]
)
def test_splits_fill_the_device_and_no_share_is_shorter_than_a_tile(pairs: int, context: int, splits: int) -> None:
    assert triton_decode.num_splits(pairs, context, 132) == splits
