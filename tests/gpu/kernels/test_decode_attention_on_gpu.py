"""Attention of one query a row, or of a few, split and joined in one kernel, against float64.

Every byte that no row may read is NaN.

python -m pytest -m gpu tests/gpu/kernels
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from photon_grpc.kernels import TRITON, DependentChain
from photon_grpc.kernels.attention import gluon_decode
from photon_grpc.kernels.attention.dispatch import KernelAttention
from photon_grpc.kernels.attention.spec import AttentionSpec
from tests.kernels.paged import Shape, attend, expected, paged_batch, tolerance

pytestmark = pytest.mark.gpu
# (query heads, key heads, head size)
HEADS = [(32, 8, 64), (32, 8, 128), (4, 2, 32), (7, 1, 64), (16, 1, 128), (8, 4, 256), (4, 1, 256)]
WINDOWS = [1, 100, 512]
# Rows of one key; shorter than, as long as and longer than a step and a split; several splits.
CONTEXTS = {
    "short": [1, 2, 16, 17, 64, 65, 272],
    "long": [511, 512, 513, 514, 1, 1025, 2000],
    "one": [4096],
    "many": [1, 300, 63, 129] * 20,
    "two": [289, 4095],
    "longest": [8193, 1, 8191],
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("block_size", [8, 16, 48, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, block_size: int, contexts: list[int], early: bool
) -> None:
    batch = paged_batch(Shape(*heads, block_size), [1] * len(contexts), contexts, dtype, "cuda")
    rows = len(contexts)
    counters = torch.zeros(rows * heads[1], dtype=torch.int32, device="cuda")
    q = torch.full((rows + 1, heads[0], heads[2]), torch.nan, dtype=dtype, device="cuda")
    q[:rows] = batch.q
    out = torch.full_like(q, torch.nan)
    chain = DependentChain(counters, history_is_settled=early)
    for _ in range(2):
        gluon_decode.launch(q, batch.cache, batch.layer, batch.meta, out, chain=chain)
    torch.testing.assert_close(out[:rows].double().cpu(), expected(batch), **tolerance(dtype))
    assert out[rows:].isnan().all()
    assert not counters.any()


def around_windows(window: int) -> list[int]:
    """Return contexts about a window, two of them and borders of pages, and much longer ones."""
    return sorted({max(1, edge + by) for edge in (1, 64, window, 2 * window) for by in (-1, 0, 1)}) + [1999, 4096, 9000]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_windows_equal_dense_attention(heads: tuple[int, int, int], block_size: int, window: int, early: bool) -> None:
    contexts = around_windows(window)
    batch = paged_batch(
        Shape(*heads, block_size), [1] * len(contexts), contexts, torch.bfloat16, "cuda", window=window
    )  # fmt: skip
    counters = torch.zeros(len(contexts) * heads[1], dtype=torch.int32, device="cuda")
    out = torch.full_like(batch.q, torch.nan)
    chain = DependentChain(counters, history_is_settled=early)
    gluon_decode.launch(batch.q.contiguous(), batch.cache, batch.layer, batch.meta, out, chain=chain)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(torch.bfloat16))
    assert not counters.any()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [heads for heads in HEADS if heads[2] >= 64], ids=str)
def test_pages_of_8_bits_equal_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype, window: int, early: bool
) -> None:
    contexts = [*around_windows(100), 8193]
    batch = paged_batch(
        Shape(*heads, 64), [1] * len(contexts), contexts, dtype, "cuda", window=window, in_8_bits=True
    )  # fmt: skip
    counters = torch.zeros(len(contexts) * heads[1], dtype=torch.int32, device="cuda")
    out = torch.full_like(batch.q, torch.nan)
    chain = DependentChain(counters, history_is_settled=early)
    gluon_decode.launch(batch.q.contiguous(), batch.cache, batch.layer, batch.meta, out, chain=chain)
    torch.testing.assert_close(out.double().cpu(), expected(batch), **tolerance(dtype))
    assert not counters.any()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("counts", [[2, 1, 0, 2] * 4, [4, 1, 3, 2] * 4, [8, 5, 1, 7] * 4], ids=["2", "4", "8"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_each_of_a_few_queries_gets_the_bits_that_it_gets_alone(
    heads: tuple[int, int, int], counts: list[int], window: int, early: bool
) -> None:
    contexts = [9, 65, 70, 71, 515, 128, 520, 64, 1025, 2051, 8, 1030, 4096, 272, 517, 9000]
    batch = paged_batch(Shape(*heads, 64), counts, contexts, torch.bfloat16, "cuda", window=window)
    counters = torch.zeros(8 * sum(counts) * heads[1], dtype=torch.int32, device="cuda")
    chain = DependentChain(counters, history_is_settled=early)
    q = torch.full((sum(counts) + 1, heads[0], heads[2]), torch.nan, dtype=torch.bfloat16, device="cuda")
    q[:-1] = batch.q
    out, ones = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    gluon_decode.launch(q, batch.cache, batch.layer, batch.meta, out, chain=chain)
    torch.testing.assert_close(out[:-1].double().cpu(), expected(batch), **tolerance(torch.bfloat16))
    assert out[-1].isnan().all()
    assert not counters.any()
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    lengths = [context - count + j + 1 for count, context in zip(counts, contexts, strict=True) for j in range(count)]
    alone = dataclasses.replace(
        batch.meta,
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda"),
        context_len=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_tables=batch.meta.block_tables[rows].contiguous(),
        max_query_len=1,
        min_query_len=1,
    )
    gluon_decode.launch(q, batch.cache, batch.layer, alone, ones, chain=chain)
    assert torch.equal(out[:-1], ones[:-1])


@pytest.mark.parametrize("heads", [(32, 8, 64), (32, 8, 128)], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(heads: tuple[int, int, int]) -> None:
    contexts = [1025, 7, 272, 2000, 64, 1500, 333, 90]
    batch = paged_batch(Shape(*heads, 64), [1] * 8, contexts, torch.bfloat16, "cuda")
    counters = torch.zeros(8 * heads[1], dtype=torch.int32, device="cuda")
    q = batch.q.contiguous()
    chain = DependentChain(counters)
    outs = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    gluon_decode.launch(q, batch.cache, batch.layer, batch.meta, outs[0], chain=chain)
    others = torch.arange(8, device="cuda") % 2 == 1
    shorter = dataclasses.replace(batch.meta, context_len=batch.meta.context_len.where(others, 1))
    gluon_decode.launch(q, batch.cache, batch.layer, shorter, outs[1], chain=chain)
    assert torch.equal(outs[0][others], outs[1][others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 64), (32, 8, 128)], ids=str)
def test_rows_of_one_query_among_prompts(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    counts, contexts = [1, 9, 1, 17] * 10, [270, 9, 1, 64] * 10
    batch = paged_batch(Shape(*heads, 64), counts, contexts, dtype, "cuda")
    slots = torch.zeros(sum(counts), dtype=torch.int64, device="cuda")
    spec = AttentionSpec(heads[0], batch.meta.scale, dtype)
    chosen = TRITON.attention(spec, batch.meta, batch.cache, slots)
    assert isinstance(chosen, KernelAttention)
    if torch.cuda.get_device_capability()[0] == 9:
        assert chosen.launches[1].func is gluon_decode.launch_short_rows
    out = torch.full(batch.q.shape, torch.nan, dtype=dtype, device="cuda")
    counters = torch.zeros(len(counts) * heads[1], dtype=torch.int32, device="cuda")
    gluon_decode.launch_short_rows(batch.q, batch.cache, batch.layer, batch.meta, out, counters=counters)
    assert not counters.any()
    ones = torch.tensor([count == 1 for count in counts for _ in range(count)])
    torch.testing.assert_close(out[ones].double().cpu(), expected(batch)[ones], **tolerance(dtype))
    assert out[~ones].isnan().all()
    whole = attend(TRITON, batch.q, batch.cache, batch.layer, batch.meta)
    torch.testing.assert_close(whole.double().cpu(), expected(batch), **tolerance(dtype))
