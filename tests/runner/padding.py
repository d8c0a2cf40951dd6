"""Batches one row and one token short of a shape, over NaN and garbage wherever padding and free slots could reach."""

from __future__ import annotations

import random

import torch

from photon_grpc.core.batch import DRAFT_COUNTS, Admission, Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.runner.buckets import Buckets, decode_shape
from photon_grpc.runner.drafting import NgramSpeculation
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import StepShape
from tests.runner.tenants import poison

MAX_MODEL_LEN = 256
#: A table of whole blocks for every slot.
NUM_SEQS = 16
SPECULATION = NgramSpeculation(7)
LEVELS = ("plain", "filtered", "shaped")


def shapes() -> list[StepShape]:
    """Return every shape that rows of at most MAX_MODEL_LEN tokens reach."""
    buckets = Buckets(NUM_SEQS, SPECULATION.max_drafts)
    decode = [decode_shape(rows) for rows in buckets.rows]
    mixed = [shape for shape in buckets.mixed_shapes() if shape.num_tokens <= shape.num_rows * 128]
    return [*decode, *mixed, *buckets.verify]


def check(replayed: ModelRunner, eager: ModelRunner, shape: StepShape, level: str) -> None:
    """Check that a batch one short of `shape` gives the ids of an eager step.

    It changes its own rows' cells and, besides them, only block 0.
    """
    batch, admissions = short_of(shape, level)
    state: list[torch.Tensor] = []
    for runner in (replayed, eager):
        for column in columns(runner.table):
            column.zero_()
        runner.submit(Batch(0, (), (), (), left=tuple(range(1, NUM_SEQS + 1)), admissions=admissions)).result()
        pages, table = runner.cache.pages[0], runner.table
        generator = torch.Generator().manual_seed(7)
        pages[1:] = torch.randn(pages[1:].shape, generator=generator).to(pages)
        pages[0] = torch.nan
        for slot in range(len(batch.slots) + 1, NUM_SEQS + 1):
            poison(table, slot, random.Random(slot))
        state = [pages.clone(), *(column.clone() for column in columns(table))]
    mine, theirs = (runner.submit(batch).result() for runner in (replayed, eager))
    assert (mine.ids, mine.lengths, mine.faults) == (theirs.ids, theirs.lengths, {})
    cells, expected = replayed.cache.pages[0], eager.cache.pages[0]
    written = torch.zeros(cells.shape[0], cells.shape[4], dtype=torch.bool)
    block_size = cells.shape[4]
    for admission, count in zip(admissions, batch.counts, strict=True):
        for at in range(admission.num_computed, admission.num_computed + count):
            written[admission.blocks[0][at // block_size], at % block_size] = True
    seen, wanted, before = (each.movedim(4, 1).flatten(2) for each in (cells[1:], expected[1:], state[0][1:]))
    at = written[1:].to(cells.device)
    torch.testing.assert_close(seen[at], wanted[at], rtol=1e-4, atol=1e-3)
    assert torch.equal(bits(seen[~at]), bits(before[~at]))
    for column, other, old in zip(columns(replayed.table), columns(eager.table), state[1:], strict=True):
        assert torch.equal(bits(column)[1:], bits(other)[1:])
        assert torch.equal(bits(column)[len(batch.slots) + 1 :], bits(old)[len(batch.slots) + 1 :])


def short_of(shape: StepShape, level: str) -> tuple[Batch, tuple[Admission, ...]]:
    num_rows = max(1, shape.num_rows - 1)
    if shape.kind == "verify":
        return short_verify(shape, num_rows, level)
    num_tokens = num_rows if shape.kind == "decode" else shape.num_tokens - 1
    counts = [num_tokens // num_rows + (row < num_tokens % num_rows) for row in range(num_rows)]
    # In a mixed step the last of several rows is in the middle of its prompt.
    yields = [1] * num_rows
    if shape.kind == "mixed" and num_rows > 1:
        yields[-1] = 0
    admissions = tuple(admission(row + 1, count, level) for row, count in enumerate(counts))
    return Batch(1, tuple(range(1, num_rows + 1)), tuple(counts), tuple(yields)), admissions


def short_verify(shape: StepShape, num_rows: int, level: str) -> tuple[Batch, tuple[Admission, ...]]:
    """Return rows with all numbers of drafts, of which some are right."""
    drafts = max(each for each in DRAFT_COUNTS if each < shape.num_tokens // shape.num_rows)
    counts = tuple(max(2, drafts + 1 - row) for row in range(num_rows))
    admissions = tuple(admission(row + 1, 1, level) for row in range(num_rows))
    return Batch(1, tuple(range(1, num_rows + 1)), counts, counts, drafts=drafts), admissions


def admission(slot: int, count: int, level: str) -> Admission:
    num_computed = 5 + 3 * slot
    length, per_row = num_computed + count, MAX_MODEL_LEN // 8
    ids = tuple((7 * slot + 3 * at) % 320 for at in range(length))
    blocks = (tuple(range(1 + (slot - 1) * per_row, 1 + slot * per_row)),)
    sampling = SamplingParams(0.0) if slot % 3 == 0 else SamplingParams(0.9, seed=slot)
    if level == "filtered" and slot % 3 == 1:
        sampling = SamplingParams(0.9, top_k=20, top_p=0.9, seed=slot)
    banned = (3, 40, 64) if level == "shaped" and slot % 2 else ()
    return Admission(slot, ids, length, num_computed, blocks, sampling, 0, 4 if banned else 0, banned)


def columns(table: SlotTable) -> list[torch.Tensor]:
    """Return everything on the device, slots first."""
    return [table.token_ids, table.block_table, table.banned_ids, table.masks, table._floats.T, table._ints.T]


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits, in which NaN is equal to itself."""
    return values.contiguous().view(torch.uint8)
