"""Attention over latents on CUDA: against torch, and the same bits in prompts, chunks and single tokens."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.attention import latent
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.spec import AttentionSpec

pytestmark = pytest.mark.gpu

HEADS, RANK, ROTATED, BLOCK_SIZE = 16, 512, 64, 64


def rows(counts: list[int], contexts: list[int]) -> AttentionMetadata:
    columns = -(-max(contexts) // BLOCK_SIZE)
    tables = (torch.randperm(len(counts) * columns) + 1).view(len(counts), columns).int().cuda()
    starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    lengths = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    return AttentionMetadata(starts, lengths, tables, 0.05, max(counts), max(contexts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("counts", "contexts"), [([1, 1, 1], [1, 700, 1300]), ([33, 1, 4], [600, 513, 900]), ([3, 8], [512, 1030])]
)
def test_sums_are_those_of_torch(dtype: torch.dtype, counts: list[int], contexts: list[int]) -> None:
    torch.manual_seed(3)
    meta, options = rows(counts, contexts), {"dtype": dtype, "device": "cuda"}
    pages = torch.randn(meta.block_tables.numel() + 1, 2, 1, 1, BLOCK_SIZE, RANK + ROTATED, **options)
    q = torch.randn(sum(counts), HEADS, RANK + ROTATED, **options)
    slots = torch.zeros(sum(counts), dtype=torch.int64, device="cuda")
    attention = latent.attention(AttentionSpec(HEADS, 0.05, dtype, RANK), meta, pages, slots, is_torch=False)
    expected = latent.reference(q.float(), pages.float(), 1, meta, RANK)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attention.attend(q, 1).float(), expected, atol=tolerance, rtol=tolerance)
    given = torch.randn(sum(counts), 1, RANK + ROTATED, **options)
    places = torch.randperm(pages.shape[0] * BLOCK_SIZE, device="cuda")[: sum(counts)]
    kept = pages.clone()
    latent.write_reference(given[:, 0], kept, 1, places)
    latent.attention(AttentionSpec(HEADS, 0.05, dtype, RANK), meta, pages, places, is_torch=False).write(
        given, given, 1
    )
    assert torch.equal(pages, kept)


def test_a_token_has_the_same_bits_in_prompts_chunks_and_alone() -> None:
    torch.manual_seed(4)
    length, dtype = 1200, torch.bfloat16
    meta, options = rows([length], [length]), {"dtype": dtype, "device": "cuda"}
    pages = torch.randn(meta.block_tables.numel() + 1, 1, 1, 1, BLOCK_SIZE, RANK + ROTATED, **options)
    q = torch.randn(length, HEADS, RANK + ROTATED, **options)
    spec, slots = AttentionSpec(HEADS, 0.05, dtype, RANK), torch.zeros(length, dtype=torch.int64, device="cuda")
    whole = latent.attention(spec, meta, pages, slots, is_torch=False).attend(q, 0)
    for count, stop in ((1, 1), (1, 512), (1, 513), (1, 1200), (5, 1030), (8, 516), (100, 700)):
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        lengths = torch.tensor([stop], dtype=torch.int32, device="cuda")
        for longest in (stop, 4096):
            some = AttentionMetadata(starts, lengths, meta.block_tables, 0.05, count, longest)
            found = latent.attention(spec, some, pages, slots[:count], is_torch=False).attend(q[stop - count : stop], 0)
            assert torch.equal(found, whole[stop - count : stop]), (count, stop, longest)
