"""From the rows of a Batch to the tensors of a forward pass, by gathers from the slot table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.kernels import AttentionMetadata
from photon_grpc.layers.context import StepContext
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class Inputs:
    """
    slots: int64 [B]. token_ids: int32 [T]. ctx: positions, slot mapping and attention of the T tokens.
    context_len: int64 [B], keys of each row, the new ones included.
    last: int64 [R], the last token of each row that yields; drawing: int64 [R], those rows.
    """

    slots: torch.Tensor
    token_ids: torch.Tensor
    context_len: torch.Tensor
    last: torch.Tensor
    drawing: torch.Tensor
    ctx: StepContext


def prepare(batch: Batch, table: SlotTable, cache: torch.Tensor, decoder: Decoder) -> Inputs:
    """Everything about the rows' content comes from the device; the host contributes slots, counts and bounds."""
    num_rows, num_tokens = len(batch.slots), sum(batch.counts)
    yielding = [row for row, yields in enumerate(batch.yields) if yields]
    ints = table.to_device((*batch.slots, *batch.counts, *yielding), torch.int64)
    slots, counts, drawing = torch.split(ints, [num_rows, num_rows, len(yielding)])
    ends = counts.cumsum(0)
    before = table.num_computed[slots]
    if num_tokens == num_rows:
        positions, tokens_slots = before, slots
    else:
        rows = torch.repeat_interleave(counts, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=table.device) + (before - ends + counts)[rows]
        tokens_slots = slots[rows]
    blocks = table.block_table[tokens_slots, positions // table.block_size]
    contexts = [table.launched[slot] + count for slot, count in zip(batch.slots, batch.counts, strict=True)]
    context_len = before + counts
    query_start = torch.zeros(num_rows + 1, dtype=torch.int32, device=table.device)
    query_start[1:] = ends
    attention = AttentionMetadata(
        query_start=query_start,
        context_len=context_len.int(),
        block_tables=table.block_table[slots, : table.plan.columns(max(contexts))],
        scale=decoder.attention_scale,
        max_query_len=max(batch.counts),
        max_context_len=max(contexts),
        min_query_len=min(batch.counts),
        counts=batch.counts,
        contexts=contexts,
    )
    slot_mapping = blocks.long() * table.block_size + positions % table.block_size
    return Inputs(
        slots=slots,
        token_ids=table.token_ids[tokens_slots, positions],
        context_len=context_len,
        last=ends[drawing] - 1,
        drawing=drawing,
        ctx=StepContext(positions, (decoder.group_context(cache, slot_mapping, attention),)),
    )
