"""A step's way out of the slot table and back into it.

    decode_inputs: of each slot the last token, its position, where its key goes, how many keys it sees, which pages they are in
    advance:       the drawn id behind the last token, one token more computed; slot 0 (padding) stays as it is
    mixed_inputs:  of each slot its next `counts` tokens, one row's behind the other's; what is left of T tokens is the first of slot 0
    advance_mixed: `counts` tokens more computed, and the drawn id behind them where the row yields

Shapes: slots, counts, yields int64 [B], token_ids int32 [S, L], num_computed int64 [S], block_table int32 [S, M]
-> token int32 [T], position int64 [T], slot_mapping int64 [T], context_len int32 [B], block_tables int32 [B, M], and of mixed steps
query_start int32 [B + 1], last int64 [B], each row's last token. T is B in decode steps.
Bytes moved: 8 · B · M and a few for each row and token.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.jit import jit, launches, next_power_of_2, tl

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
#: Those of a decode step, then query_start and last.
MixedInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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


def mixed_inputs_reference(
    slots: torch.Tensor,
    counts: torch.Tensor,
    num_tokens: int,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> MixedInputs:
    """mixed_inputs in torch: (token, position, slot_mapping, context_len, block_tables, query_start, last)."""
    ends, before = counts.cumsum(0), num_computed[slots]
    number = torch.arange(num_tokens, device=slots.device)
    row = torch.searchsorted(ends, number, right=True).clamp(max=slots.shape[0] - 1)
    is_real = number < ends[-1]
    slot = torch.where(is_real, slots[row], 0)
    position = torch.where(is_real, number + (before - ends + counts)[row], 0)
    block = block_table[slot, position // block_size].long()
    return (
        token_ids[slot, position],
        position,
        block * block_size + position % block_size,
        (before + counts).int(),
        block_table[slots],
        torch.nn.functional.pad(ends, (1, 0)).int(),
        (ends - 1).clamp(min=0),
    )


def advance_mixed_reference(
    slots: torch.Tensor,
    counts: torch.Tensor,
    yields: torch.Tensor,
    ids: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
) -> None:
    """advance_mixed in torch: changes token_ids and num_computed. A row in the middle of its prompt keeps the id that it has there."""
    behind = num_computed[slots] + counts
    token_ids[slots, behind] = torch.where(yields > 0, ids.clamp(min=0).int(), token_ids[slots, behind])
    num_computed[slots] = behind
    num_computed[:1].zero_()


@jit
def mixed_inputs_kernel(
    slots, counts, token_ids, num_computed, block_table,
    token, position, slot_mapping, context_len, tables, query_start, last,
    token_stride, table_stride, num_columns, num_rows, num_tokens,
    ROWS_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row, and one for the tokens behind the last."""
    row = tl.program_id(0)
    other = tl.arange(0, ROWS_PAD)
    first = tl.sum(tl.load(counts + other, mask=other < tl.minimum(row, num_rows), other=0), axis=0)
    tl.store(query_start + row, first.to(tl.int32))
    if row == num_rows:
        page = tl.load(block_table).to(tl.int64)
        id_of_padding = tl.load(token_ids)
        for start in range(first, num_tokens, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < num_tokens
            tl.store(token + at, tl.zeros([BLOCK], tl.int32) + id_of_padding, mask=inside)
            tl.store(position + at, tl.zeros([BLOCK], tl.int64), mask=inside)
            tl.store(slot_mapping + at, tl.zeros([BLOCK], tl.int64) + page * BLOCK_SIZE, mask=inside)
    else:
        slot, count = tl.load(slots + row), tl.load(counts + row)
        before = tl.load(num_computed + slot)
        tl.store(context_len + row, (before + count).to(tl.int32))
        tl.store(last + row, tl.maximum(first + count - 1, 0))
        for start in range(0, count, BLOCK):
            number = start + tl.arange(0, BLOCK)
            inside = number < count
            at = before + number
            page = tl.load(block_table + slot * table_stride + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            tl.store(token + first + number, tl.load(token_ids + slot * token_stride + at, mask=inside), mask=inside)
            tl.store(position + first + number, at, mask=inside)
            tl.store(slot_mapping + first + number, page * BLOCK_SIZE + at % BLOCK_SIZE, mask=inside)
        # Pages behind the last one are not read by anybody.
        for start in range(0, (before + count) // BLOCK_SIZE + 1, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < num_columns
            page = tl.load(block_table + slot * table_stride + column, mask=inside, other=0)
            tl.store(tables + row.to(tl.int64) * num_columns + column, page, mask=inside)


@jit
def advance_mixed_kernel(slots, counts, yields, ids, token_ids, num_computed, token_stride):
    """One program a row."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot == 0:
        return
    behind = tl.load(num_computed + slot) + tl.load(counts + row)
    if tl.load(yields + row) > 0:
        tl.store(token_ids + slot * token_stride + behind, tl.maximum(tl.load(ids + row), 0).to(tl.int32))
    tl.store(num_computed + slot, behind)


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


def mixed_inputs(
    slots: torch.Tensor,
    counts: torch.Tensor,
    num_tokens: int,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> MixedInputs:
    """As `mixed_inputs_reference`; what lies behind a row's last page is undefined."""
    if not launches(slots):
        return mixed_inputs_reference(slots, counts, num_tokens, token_ids, num_computed, block_table, block_size)
    num_rows, num_columns, device = slots.shape[0], block_table.shape[1], slots.device
    token = torch.empty(num_tokens, dtype=torch.int32, device=device)
    position, slot_mapping = torch.empty((2, num_tokens), dtype=torch.int64, device=device)
    context_len = torch.empty(num_rows, dtype=torch.int32, device=device)
    query_start = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    last = torch.empty(num_rows, dtype=torch.int64, device=device)
    tables = torch.empty((num_rows, num_columns), dtype=torch.int32, device=device)
    mixed_inputs_kernel[(num_rows + 1,)](
        slots, counts, token_ids, num_computed, block_table,
        token, position, slot_mapping, context_len, tables, query_start, last,
        token_ids.stride(0), block_table.stride(0), num_columns, num_rows, num_tokens,
        ROWS_PAD=next_power_of_2(num_rows), BLOCK_SIZE=block_size, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return token, position, slot_mapping, context_len, tables, query_start, last


def advance_mixed(
    slots: torch.Tensor,
    counts: torch.Tensor,
    yields: torch.Tensor,
    ids: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
) -> None:
    """As `advance_mixed_reference`; no slot but 0 may stand twice in `slots`."""
    if not launches(slots):
        advance_mixed_reference(slots, counts, yields, ids, token_ids, num_computed)
        return
    advance_mixed_kernel[(slots.shape[0],)](
        slots, counts, yields, ids, token_ids, num_computed, token_ids.stride(0), num_warps=1
    )
