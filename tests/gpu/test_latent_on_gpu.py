"""Attention over latents on CUDA: against torch, and the same bits in prompts, chunks and single tokens."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.attention import latent, latent_queries, latent_values
from photon_grpc.kernels.attention.latent_queries import LatentOutput
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.rotary.rotate_store import Rotation

pytestmark = pytest.mark.gpu

HEADS, RANK, ROTATED, BLOCK_SIZE = 16, 512, 64, 64


def rows(counts: list[int], contexts: list[int], block_size: int = BLOCK_SIZE) -> AttentionMetadata:
    columns = -(-max(contexts) // block_size)
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


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_what_is_behind_a_context_may_be_nan(block_size: int) -> None:
    torch.manual_seed(10)
    counts, contexts = [1, 1, 40, 3], [1, 700, 301, 520]
    meta, options = rows(counts, contexts, block_size), {"dtype": torch.bfloat16, "device": "cuda"}
    pages = torch.randn(meta.block_tables.numel() + 1, 2, 1, 1, block_size, RANK + ROTATED, **options)
    q = torch.randn(sum(counts), HEADS, RANK + ROTATED, **options)
    slots = torch.zeros(sum(counts), dtype=torch.int64, device="cuda")
    attention = latent.attention(AttentionSpec(HEADS, 0.05, q.dtype, RANK), meta, pages, slots, is_torch=False)
    expected = attention.attend(q, 1)
    torch.testing.assert_close(
        expected.float(), latent.reference(q.float(), pages.float(), 1, meta, RANK), atol=2e-2, rtol=2e-2
    )
    pages[0] = torch.nan
    for row, context in enumerate(contexts):
        for column, block in enumerate(meta.block_tables[row].tolist()):
            pages[block, 1, 0, 0, max(0, min(block_size, context - column * block_size)) :] = torch.nan
    assert torch.equal(attention.attend(q, 1), expected)


@pytest.mark.parametrize("num_rows", [1, 5, 40, 140])
def test_lanes_are_shared_out_without_another_bit(num_rows: int) -> None:
    torch.manual_seed(9)
    contexts = [(1, 255, 256, 257, 1300, 4097, 9000)[(row + num_rows) % 7] for row in range(num_rows)]
    meta, options = rows([1] * num_rows, contexts), {"dtype": torch.bfloat16, "device": "cuda"}
    pages = torch.randn(meta.block_tables.numel() + 1, 1, 1, 1, BLOCK_SIZE, RANK + ROTATED, **options)
    q = torch.randn(num_rows, HEADS, RANK + ROTATED, **options)
    spec, slots = AttentionSpec(HEADS, 0.05, q.dtype, RANK), torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    together = latent.attention(spec, meta, pages, slots, is_torch=False).attend(q, 0)
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    for row in {0, num_rows // 2, num_rows - 1}:
        for longest in (contexts[row], 16384):
            lengths, table = meta.context_len[row : row + 1], meta.block_tables[row : row + 1]
            alone = AttentionMetadata(starts, lengths, table, 0.05, 1, longest)
            found = latent.attention(spec, alone, pages, slots[:1], is_torch=False).attend(q[row : row + 1], 0)
            assert torch.equal(found[0], together[row]), (row, longest)
    expected = latent.reference(q.float(), pages.float(), 0, meta, RANK)
    torch.testing.assert_close(together.float(), expected, atol=2e-2, rtol=2e-2)


PLAIN, VALUE = 128, 128


@pytest.mark.parametrize(
    ("counts", "contexts"), [([1], [272]), ([1] * 40, [*range(1, 1400, 35)]), ([3, 8], [512, 1030]), ([90], [700])]
)
def test_values_are_those_of_torch(counts: list[int], contexts: list[int]) -> None:
    torch.manual_seed(5)
    meta, options = rows(counts, contexts), {"dtype": torch.bfloat16, "device": "cuda"}
    pages = torch.randn(meta.block_tables.numel() + 1, 1, 1, 1, BLOCK_SIZE, RANK + ROTATED, **options)
    q = torch.randn(sum(counts), HEADS, RANK + ROTATED, **options)
    weight = torch.randn(HEADS * (PLAIN + VALUE), RANK, **options) * RANK**-0.5
    slots = torch.zeros(sum(counts), dtype=torch.int64, device="cuda")
    attention = latent.attention(AttentionSpec(HEADS, 0.05, q.dtype, RANK), meta, pages, slots, is_torch=False)
    out = torch.empty(sum(counts), HEADS, VALUE, **options)
    attention.values(q, 0, weight, PLAIN, out)
    o = latent.reference(q.float(), pages.float(), 0, meta, RANK)
    expected = torch.einsum("thr,hvr->thv", o, weight.view(HEADS, -1, RANK)[:, PLAIN:].float())
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    # The same bits as those that are attended first.
    apart = torch.empty_like(out)
    latent_values.launch(attention.attend(q, 0), None, weight, PLAIN, apart)
    assert torch.equal(out, apart)


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 65, 300])
@pytest.mark.parametrize("slices", [0, 2])
def test_queries_and_latents_are_those_of_torch(num_tokens: int, slices: int) -> None:
    torch.manual_seed(6)
    options, hidden = {"dtype": torch.bfloat16, "device": "cuda"}, 2048
    h = torch.randn(num_tokens, hidden, **options)
    width = HEADS * (PLAIN + ROTATED) + RANK + ROTATED
    sums = torch.randn(num_tokens, width, **options)
    if slices:
        sums = torch.randn(slices, num_tokens, width, device="cuda")
    partial = torch.empty(num_tokens, hidden // 16, device="cuda")
    squares.launch(h, partial)
    weight = torch.randn(HEADS * (PLAIN + VALUE), RANK, **options) * PLAIN**-0.5
    angles = torch.rand(400, ROTATED // 2, device="cuda")
    slots = torch.randperm(12 * BLOCK_SIZE, device="cuda")[:num_tokens] + BLOCK_SIZE
    rotation = Rotation(angles.cos(), angles.sin(), torch.arange(num_tokens, device="cuda"), slots)
    found = []
    for is_torch in (False, True):
        q = torch.zeros(num_tokens, HEADS * (RANK + ROTATED), **options)
        pages = torch.zeros(14, 2, 1, 1, BLOCK_SIZE, RANK + ROTATED, **options)
        norm = (torch.rand(RANK, **options) if not found else found[0][2], 1e-6)
        out = LatentOutput(q, pages, 1, rotation, norm, weight, PLAIN)
        if is_torch:
            latent_queries.reference(sums, h, 1e-6, out)
        else:
            latent_queries.launch(sums, h, partial, 1e-6, out)
        found.append((q, pages, norm[0]))
    torch.testing.assert_close(found[0][0].float(), found[1][0].float(), atol=3e-2, rtol=2e-2)
    torch.testing.assert_close(found[0][1].float(), found[1][1].float(), atol=2e-2, rtol=1e-2)


def test_queries_have_the_same_bits_at_any_number_of_tokens() -> None:
    torch.manual_seed(7)
    options, hidden = {"dtype": torch.bfloat16, "device": "cuda"}, 2048
    h = torch.randn(200, hidden, **options)
    sums = torch.randn(200, HEADS * (PLAIN + ROTATED) + RANK + ROTATED, **options)
    weight, factors = torch.randn(HEADS * (PLAIN + VALUE), RANK, **options), torch.rand(RANK, **options)
    angles = torch.rand(400, ROTATED // 2, device="cuda")

    def launched(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.arange(first, first + count, device="cuda")
        of, partial = slice(first, first + count), torch.empty(count, hidden // 16, device="cuda")
        squares.launch(h[of], partial)
        q = torch.zeros(count, HEADS * (RANK + ROTATED), **options)
        pages = torch.zeros(8, 1, 1, 1, BLOCK_SIZE, RANK + ROTATED, **options)
        rotation = Rotation(angles.cos(), angles.sin(), numbers, numbers + BLOCK_SIZE)
        out = LatentOutput(q, pages, 0, rotation, (factors, 1e-6), weight, PLAIN)
        latent_queries.launch(sums[of].contiguous(), h[of].contiguous(), partial, 1e-6, out)
        return q, pages.view(-1, RANK + ROTATED)[BLOCK_SIZE + first : BLOCK_SIZE + first + count]

    whole = launched(0, 200)
    for first, count in ((0, 1), (5, 17), (100, 64), (30, 65)):
        for found, expected in zip(launched(first, count), (whole[0], whole[1]), strict=True):
            assert torch.equal(found, expected[first : first + count])
