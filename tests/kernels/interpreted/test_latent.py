"""Attention over latents in Triton's interpreter, against torch and float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from photon_grpc.kernels.attention import latent, latent_queries
from photon_grpc.kernels.attention.latent_queries import LatentOutput
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.rotary.rotate_store import Rotation

HEADS, RANK, ROTATED, BLOCK_SIZE = 3, 24, 8, 16


def step(counts: list[int], contexts: list[int], *, padding: int = 0) -> tuple[AttentionMetadata, torch.Tensor]:
    """Return the rows of a step over shuffled blocks, and the slots of its tokens; block 0 is of padding."""
    columns = -(-max(contexts) // BLOCK_SIZE)
    order = torch.randperm(len(counts) * columns, generator=torch.Generator().manual_seed(3)) + 1
    tables = order.view(len(counts), columns).int()
    slots = [
        int(tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, (count, context) in enumerate(zip(counts, contexts, strict=True))
        for position in range(context - count, context)
    ]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    meta = AttentionMetadata(starts, lengths, tables, 0.3, max(counts), max(contexts))
    return meta, torch.tensor(slots + [0] * padding)


def pages_of(meta: AttentionMetadata) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(meta.block_tables.numel() + 1, 2, 1, 1, BLOCK_SIZE, RANK + ROTATED, generator=generator)


SPEC = AttentionSpec(HEADS, 0.3, torch.float32, RANK)


@pytest.fixture(autouse=True)
def short_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "LANE", 64)


@pytest.mark.parametrize(
    ("counts", "contexts", "padding"), [([1, 1], [1, 150], 0), ([1], [64], 2), ([9, 1], [9, 80], 1), ([3], [140], 0)]
)
def test_sums_are_those_of_torch(counts: list[int], contexts: list[int], padding: int) -> None:
    meta, slots = step(counts, contexts, padding=padding)
    pages = pages_of(meta)
    q = torch.randn(sum(counts) + padding, HEADS, RANK + ROTATED, generator=torch.Generator().manual_seed(5))
    given = torch.randn(len(slots), 1, RANK + ROTATED, generator=torch.Generator().manual_seed(6))
    both = [pages.clone(), pages.clone()]
    found = []
    for kept, is_torch in zip(both, (False, True), strict=True):
        attention = latent.attention(SPEC, meta, kept, slots, is_torch=is_torch)
        attention.write(given, given, 1)
        found.append(attention.attend(q, 1)[: sum(counts)])
    assert torch.equal(both[0][1:], both[1][1:])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_token_of_a_prompt_has_the_sums_of_a_step_of_its_own() -> None:
    meta, slots = step([130], [130])
    pages = pages_of(meta)
    q = torch.randn(130, HEADS, RANK + ROTATED, generator=torch.Generator().manual_seed(5))
    whole = latent.attention(SPEC, meta, pages, slots, is_torch=False).attend(q, 0)
    for position in (0, 63, 64, 129):
        alone = AttentionMetadata(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([position + 1], dtype=torch.int32),
            meta.block_tables,
            0.3,
            1,
            130,
        )
        found = latent.attention(SPEC, alone, pages, slots[:1], is_torch=False).attend(q[position : position + 1], 0)
        torch.testing.assert_close(found[0], whole[position], atol=1e-6, rtol=1e-6)


PLAIN, VALUE = 10, 12


def weight_of_heads() -> torch.Tensor:
    return torch.randn(HEADS * (PLAIN + VALUE), RANK, generator=torch.Generator().manual_seed(7)) * RANK**-0.5


@pytest.mark.parametrize(("counts", "contexts"), [([1, 1], [150, 3]), ([9], [80]), ([2, 3], [64, 140])])
def test_values_are_what_is_attended_expanded(counts: list[int], contexts: list[int]) -> None:
    meta, slots = step(counts, contexts)
    pages, weight = pages_of(meta), weight_of_heads()
    q = torch.randn(sum(counts), HEADS, RANK + ROTATED, generator=torch.Generator().manual_seed(5))
    found = []
    for is_torch in (False, True):
        out = torch.empty(sum(counts), HEADS, VALUE)
        latent.attention(SPEC, meta, pages, slots, is_torch=is_torch).values(q, 1, weight, PLAIN, out)
        found.append(out)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_tokens", "slices"), [(1, 0), (19, 0), (5, 2)])
def test_queries_and_latents_are_those_of_torch(num_tokens: int, slices: int) -> None:
    def numbers(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    h, width = numbers(1, num_tokens, 48), HEADS * (PLAIN + ROTATED) + RANK + ROTATED
    sums = numbers(2, slices, num_tokens, width) if slices else numbers(2, num_tokens, width)
    angles, slots = numbers(3, 40, ROTATED // 2), torch.arange(num_tokens).flip(0) + BLOCK_SIZE
    rotation = Rotation(angles.cos(), angles.sin(), torch.arange(num_tokens) * 2, slots)
    found = []
    for launch in (False, True):
        q = torch.zeros(num_tokens, HEADS * (RANK + ROTATED))
        pages = torch.zeros(4, 2, 1, 1, BLOCK_SIZE, RANK + ROTATED)
        out = LatentOutput(q, pages, 1, rotation, (numbers(4, RANK), 1e-5), weight_of_heads(), PLAIN)
        if launch:
            latent_queries.launch(sums, h, squares.reference(h), 1e-6, out)
        else:
            latent_queries.reference(sums, h, 1e-6, out)
        found.append((q, pages))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
