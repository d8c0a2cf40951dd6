"""A decode step's way out of the slot table and back into it.

    decode_inputs: of each slot the last token, its position, where its key goes, how many keys it sees, which pages they are in
    advance:       the drawn id behind the last token, one token more computed; slot 0 (padding) stays as it is

Shapes: slots int64 [B], token_ids int32 [S, L], num_computed int64 [S], block_table int32 [S, M]
-> token int32 [B], position int64 [B], slot_mapping int64 [B], context_len int32 [B], block_tables int32 [B, M].
Bytes moved: 8 · B · M and a few for each row.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.jit import jit, launches, tl

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def decode_inputs_reference(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> Inputs:
    """decode_inputs in torch: (token, position, slot_mapping, context_len, block_tables)."""
    position = num_computed[slots]
    tables = block_table[slots]
    block = tables.gather(1, (position // block_size)[:, None])[:, 0].long()
    return (
        token_ids[slots, position],
        position,
        block * block_size + position % block_size,
        (position + 1).int(),
        tables,
    )


def advance_reference(
    slots: torch.Tensor, ids: torch.Tensor, token_ids: torch.Tensor, num_computed: torch.Tensor
) -> None:
    """advance in torch: changes token_ids and num_computed. An invalid id is kept as 0: it must be one that can be looked up."""
    behind = num_computed[slots] + 1
    token_ids[slots, behind] = ids.clamp(min=0).int()
    num_computed[slots] = behind
    num_computed[:1].zero_()


@jit
def decode_inputs_kernel(
    slots, token_ids, num_computed, block_table, token, position, slot_mapping, context_len, tables,
    token_stride, table_stride, num_columns, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    at = tl.load(num_computed + slot)
    block = tl.load(block_table + slot * table_stride + at // BLOCK_SIZE).to(tl.int64)
    tl.store(token + row, tl.load(token_ids + slot * token_stride + at))
    tl.store(position + row, at)
    tl.store(slot_mapping + row, block * BLOCK_SIZE + at % BLOCK_SIZE)
    tl.store(context_len + row, (at + 1).to(tl.int32))
    # Pages behind the last one are not read by anybody.
    for start in range(0, at // BLOCK_SIZE + 1, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_columns
        page = tl.load(block_table + slot * table_stride + column, mask=inside, other=0)
        tl.store(tables + row.to(tl.int64) * num_columns + column, page, mask=inside)


@jit
def advance_kernel(slots, ids, token_ids, num_computed, token_stride):
    """One program a row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot == 0:
        return
    behind = tl.load(num_computed + slot) + 1
    tl.store(token_ids + slot * token_stride + behind, tl.maximum(tl.load(ids + row), 0).to(tl.int32))
    tl.store(num_computed + slot, behind)


def decode_inputs(
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> Inputs:
    """(token, position, slot_mapping, context_len, block_tables); what lies behind a row's last page is undefined."""
    if not launches(slots):
        return decode_inputs_reference(slots, token_ids, num_computed, block_table, block_size)
    num_rows, num_columns = slots.shape[0], block_table.shape[1]
    token, context_len = torch.empty((2, num_rows), dtype=torch.int32, device=slots.device)
    position, slot_mapping = torch.empty((2, num_rows), dtype=torch.int64, device=slots.device)
    tables = torch.empty((num_rows, num_columns), dtype=torch.int32, device=slots.device)
    decode_inputs_kernel[(num_rows,)](
        slots, token_ids, num_computed, block_table, token, position, slot_mapping, context_len, tables,
        token_ids.stride(0), block_table.stride(0), num_columns, BLOCK_SIZE=block_size, BLOCK=64, num_warps=1,
    )  # fmt: skip
    return token, position, slot_mapping, context_len, tables


def advance(slots: torch.Tensor, ids: torch.Tensor, token_ids: torch.Tensor, num_computed: torch.Tensor) -> None:
    """Changes token_ids and num_computed; no slot but 0 may stand twice in `slots`."""
    if not launches(slots):
        advance_reference(slots, ids, token_ids, num_computed)
        return
    advance_kernel[(slots.shape[0],)](slots, ids, token_ids, num_computed, token_ids.stride(0), num_warps=1)
