"""The inputs of a step, read from the slot table, and its results, written back.

    decode_inputs: of each slot the last token, its position, where its key goes, how many keys it sees, which pages
    they are in
    mixed_inputs:  of each slot its next `counts` tokens, row after row; the rest of T tokens is the first of slot 0
    advance:       `counts` more tokens are computed, the sampled id follows where the row yields; slot 0 is unchanged

Shapes: slots, counts, yields int64 [B], context_len int32 [B], SlotState of S slots and G KVGroups -> token int32 [T],
position int64 [T], slot_mapping int64 [G, T], block_tables int32 [G, B, M], and of mixed steps query_start int32 [B +
1], last int64 [B], each row's last token. T is B in decode steps. `context_len` is filled: the keys that each row sees,
the new ones included.
Bytes moved: 8 · G · B · M and a few for each row and token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import jit, launches, next_power_of_2, tl


class SlotState(NamedTuple):
    """Slot state of a step: token_ids int32 [S, L], num_computed int64 [S], block_table int32 [S, G, M].

    num_known: int64 [S], ids known, where steps may draft; None where no step does.
    """

    token_ids: torch.Tensor
    num_computed: torch.Tensor
    block_table: torch.Tensor
    num_known: torch.Tensor | None = None


class StepRows(NamedTuple):
    """The rows of a step as kernels take them: slots, counts, yields int64 [B]."""

    slots: torch.Tensor
    counts: torch.Tensor
    yields: torch.Tensor


class Inputs(NamedTuple):
    """The inputs of T tokens and B rows; a decode step has no use for the last two.

    num_real: int32 [1], the tokens of rows; those behind them are padding.
    """

    token: torch.Tensor
    position: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    num_real: torch.Tensor
    query_start: torch.Tensor | None = None
    last: torch.Tensor | None = None


def decode_inputs_reference(
    slots: torch.Tensor, context_len: torch.Tensor, state: SlotState, block_size: int
) -> Inputs:
    """Return decode_inputs in torch."""
    position = state.num_computed[slots]
    tables = state.block_table[slots].transpose(0, 1)
    block = tables.gather(2, (position // block_size).expand(len(tables), -1)[:, :, None])[:, :, 0].long()
    torch.add(position, 1, out=context_len)
    num_real = (slots > 0).sum(0, keepdim=True).int()
    slot_mapping = block * block_size + position % block_size
    return Inputs(state.token_ids[slots, position], position, slot_mapping, tables, num_real)


def mixed_inputs_reference(
    slots: torch.Tensor,
    counts: torch.Tensor,
    context_len: torch.Tensor,
    num_tokens: int,
    state: SlotState,
    block_size: int,
) -> Inputs:
    """Return mixed_inputs in torch."""
    ends, before = counts.cumsum(0), state.num_computed[slots]
    number = torch.arange(num_tokens, device=slots.device)
    row = torch.searchsorted(ends, number, right=True).clamp(max=slots.shape[0] - 1)
    is_real = number < ends[-1]
    slot = torch.where(is_real, slots[row], 0)
    position = torch.where(is_real, number + (before - ends + counts)[row], 0)
    block = state.block_table[slot, :, position // block_size].t().long()
    context_len.copy_(before + counts)
    query_start = torch.nn.functional.pad(ends, (1, 0)).int()
    return Inputs(
        state.token_ids[slot, position],
        position,
        block * block_size + position % block_size,
        state.block_table[slots].transpose(0, 1),
        query_start[-1:],
        query_start,
        (ends - 1).clamp(min=0),
    )


def advance_reference(
    slots: torch.Tensor, counts: torch.Tensor, yields: torch.Tensor, ids: torch.Tensor, state: SlotState
) -> None:
    """Advance in torch; an invalid id becomes 0, which can be looked up, and rows that do not yield keep theirs."""
    token_ids, num_computed, _, num_known = state
    end = num_computed[slots] + counts
    token_ids[slots, end] = torch.where(yields > 0, ids.clamp(min=0).int(), token_ids[slots, end])
    num_computed[slots] = end
    num_computed[:1].zero_()
    if num_known is not None:
        num_known[slots] = torch.where((yields > 0) & (slots > 0), end + 1, num_known[slots])


@jit
def decode_inputs_kernel(
    slots, state, inputs, context_len, token_stride, table_stride, num_columns,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill the inputs of one row and group per program; every group stores what all groups share."""
    token_ids, num_computed, block_table, _num_known = state
    token, position, slot_mapping, tables, num_real, _query_start, _last = inputs
    row, group = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    at = tl.load(num_computed + slot)
    table = block_table + slot * table_stride + group * num_columns
    num_rows = tl.num_programs(0)
    place = group * num_rows + row
    block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
    tl.store(token + row, tl.load(token_ids + slot * token_stride + at))
    tl.store(position + row, at)
    tl.store(slot_mapping + place + group * (num_rows % 2), block * BLOCK_SIZE + at % BLOCK_SIZE)
    tl.store(context_len + row, (at + 1).to(tl.int32))
    # Padding rows are behind all others, in slot 0.
    following = tl.load(slots + row + 1, mask=row + 1 < num_rows, other=0)
    if slot != 0 and following == 0:
        tl.store(num_real, row + 1)
    if slot == 0 and row == 0:
        tl.store(num_real, 0)
    # Nothing reads pages after the last one.
    for start in range(0, at // BLOCK_SIZE + 1, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_columns
        page = tl.load(table + column, mask=inside, other=0)
        tl.store(tables + place.to(tl.int64) * num_columns + column, page, mask=inside)


@jit
def mixed_inputs_kernel(
    slots, counts, state, inputs, context_len, token_stride, table_stride, num_columns, num_rows, num_tokens,
    ROWS_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill the inputs of one row and group per program, and in one more a group those after the last row."""
    token_ids, num_computed, block_table, _num_known = state
    token, position, slot_mapping, tables, num_real, query_start, last = inputs
    row, group = tl.program_id(0), tl.program_id(1)
    slot_mapping += group.to(tl.int64) * (num_tokens + num_tokens % 2)
    other = tl.arange(0, ROWS_PAD)
    first = tl.sum(tl.load(counts + other, mask=other < tl.minimum(row, num_rows), other=0), axis=0)
    tl.store(query_start + row, first.to(tl.int32))
    if row == num_rows:
        tl.store(num_real, first.to(tl.int32))
        page = tl.load(block_table + group * num_columns).to(tl.int64)
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
        table = block_table + slot * table_stride + group * num_columns
        tl.store(context_len + row, (before + count).to(tl.int32))
        tl.store(last + row, tl.maximum(first + count - 1, 0))
        for start in range(0, count, BLOCK):
            number = start + tl.arange(0, BLOCK)
            inside = number < count
            at = before + number
            page = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            tl.store(token + first + number, tl.load(token_ids + slot * token_stride + at, mask=inside), mask=inside)
            tl.store(position + first + number, at, mask=inside)
            tl.store(slot_mapping + first + number, page * BLOCK_SIZE + at % BLOCK_SIZE, mask=inside)
        # Nothing reads pages after the last one.
        for start in range(0, (before + count) // BLOCK_SIZE + 1, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < num_columns
            page = tl.load(table + column, mask=inside, other=0)
            tl.store(tables + (group * num_rows + row).to(tl.int64) * num_columns + column, page, mask=inside)


@jit
def advance_kernel(rows, ids, state, token_stride, PDL: tl.constexpr):
    """Advance one row per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slots, counts, yields = rows
    token_ids, num_computed, _block_table, num_known = state
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot == 0:
        return
    end = tl.load(num_computed + slot) + tl.load(counts + row)
    if tl.load(yields + row) > 0:
        tl.store(token_ids + slot * token_stride + end, tl.maximum(tl.load(ids + row), 0).to(tl.int32))
        if num_known is not None:
            tl.store(num_known + slot, end + 1)
    tl.store(num_computed + slot, end)


def decode_inputs(slots: torch.Tensor, context_len: torch.Tensor, state: SlotState, block_size: int) -> Inputs:
    """Return what `decode_inputs_reference` returns; entries after a row's last page are undefined."""
    if not launches(slots):
        return decode_inputs_reference(slots, context_len, state, block_size)
    num_rows, (_, num_groups, num_columns) = slots.shape[0], state.block_table.shape
    token = torch.empty(num_rows, dtype=torch.int32, device=slots.device)
    position, slot_mapping = _places(num_groups, num_rows, slots.device)
    tables = torch.empty((num_groups, num_rows, num_columns), dtype=torch.int32, device=slots.device)
    num_real = torch.empty(1, dtype=torch.int32, device=slots.device)
    inputs = Inputs(token, position, slot_mapping, tables, num_real)
    decode_inputs_kernel[(num_rows, num_groups)](
        slots, state, inputs, context_len, state.token_ids.stride(0), state.block_table.stride(0), num_columns,
        BLOCK_SIZE=block_size, BLOCK=64, num_warps=1,
    )  # fmt: skip
    return inputs


def mixed_inputs(
    slots: torch.Tensor,
    counts: torch.Tensor,
    context_len: torch.Tensor,
    num_tokens: int,
    state: SlotState,
    block_size: int,
) -> Inputs:
    """Return what `mixed_inputs_reference` returns; entries after a row's last page are undefined."""
    if not launches(slots):
        return mixed_inputs_reference(slots, counts, context_len, num_tokens, state, block_size)
    num_rows, (_, num_groups, num_columns), device = slots.shape[0], state.block_table.shape, slots.device
    token = torch.empty(num_tokens, dtype=torch.int32, device=device)
    position, slot_mapping = _places(num_groups, num_tokens, device)
    query_start = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    last = torch.empty(num_rows, dtype=torch.int64, device=device)
    tables = torch.empty((num_groups, num_rows, num_columns), dtype=torch.int32, device=device)
    num_real = torch.empty(1, dtype=torch.int32, device=device)
    inputs = Inputs(token, position, slot_mapping, tables, num_real, query_start, last)
    strides = state.token_ids.stride(0), state.block_table.stride(0)
    mixed_inputs_kernel[(num_rows + 1, num_groups)](
        slots, counts, state, inputs, context_len, *strides, num_columns, num_rows, num_tokens,
        ROWS_PAD=next_power_of_2(num_rows), BLOCK_SIZE=block_size, BLOCK=128, num_warps=4,
    )  # fmt: skip
    return inputs


def _places(num_groups: int, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for position and slot_mapping; groups begin at 16 bytes, which kernels are compiled for."""
    places = torch.empty((1 + num_groups, num_tokens + num_tokens % 2), dtype=torch.int64, device=device)
    return places[0, :num_tokens], places[1:, :num_tokens]


def advance(
    slots: torch.Tensor, counts: torch.Tensor, yields: torch.Tensor, ids: torch.Tensor, state: SlotState
) -> None:
    """Change token_ids and num_computed as `advance_reference` does; only slot 0 may occur twice in `slots`."""
    if not launches(slots):
        advance_reference(slots, counts, yields, ids, state)
        return
    advance_kernel[(slots.shape[0],)](
        StepRows(slots, counts, yields), ids, state, state.token_ids.stride(0), num_warps=1,
        **dependent_launch(slots.device),
    )  # fmt: skip
