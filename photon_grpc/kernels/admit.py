"""Writes of a step's admissions into the slot table: one copy from the host and one kernel for all of them.

    token_ids[slot, :n] = ids;  block_table[slot, :, :m] = blocks;  ints[:, slot] and floats[:, slot] = numbers

A request that waits for its first token waits for these writes, and each operation of its own would take longer on the
host than the kernel on the device.

Shapes: token_ids int32 [S, L], block_table int32 [S, G, M], ints int64 [I, S], floats float32 [F, S]. The buffer is
int64: for each admission a header (slot, where its ids begin, their number, where its blocks begin, their number in
each group, ints, bits of the floats), padded to an even width; then the words of all ids and blocks, int32.
Bytes moved: 4 for each id and block, twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl

#: Numbers of a header before those of the slot's columns.
_PLACES = 5
_BLOCK = 1024


class SlotColumns(NamedTuple):
    """The columns that an admission writes to."""

    token_ids: torch.Tensor
    block_table: torch.Tensor
    ints: torch.Tensor
    floats: torch.Tensor


class SlotRow(NamedTuple):
    """The numbers to write of one slot; every group has as many blocks."""

    slot: int
    ids: Sequence[int]
    blocks: Sequence[Sequence[int]]
    ints: Sequence[int]
    floats: Sequence[float]


def reference(rows: Sequence[SlotRow], columns: SlotColumns) -> None:
    """Write in torch."""
    device = columns.token_ids.device
    for slot, ids, blocks, ints, floats in rows:
        columns.token_ids[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32, device=device)
        columns.block_table[slot, :, : len(blocks[0])] = torch.tensor(blocks, dtype=torch.int32, device=device)
        columns.ints[:, slot] = torch.tensor(ints, device=device)
        columns.floats[:, slot] = torch.tensor(floats, dtype=torch.float32, device=device)


class AdmitStrides(NamedTuple):
    """Elements from a column to the next, from a slot to the next in ids and in blocks, and from group to group."""

    COLUMN: int
    IDS: int
    BLOCKS: int
    GROUP: int


class AdmitLayout(NamedTuple):
    """Constants that the kernel is compiled for.

    WIDTH numbers of a header, PLACES of them before INTS and FLOATS, which are at most PAD each; GROUPS of blocks; ids
    or blocks of one program.
    """

    WIDTH: int
    PLACES: int
    INTS: int
    FLOATS: int
    PAD: int
    GROUPS: int
    BLOCK: int


@jit
def admit_kernel(packed, words, columns, strides, LAYOUT: tl.constexpr):
    """Write a chunk of ids and of blocks of one admission per program, and in its first program the numbers."""
    token_ids, block_table, ints, floats = columns
    header = packed + tl.program_id(0) * LAYOUT.WIDTH
    slot = tl.load(header)
    ids, num_ids = tl.load(header + 1), tl.load(header + 2)
    blocks, num_blocks = tl.load(header + 3), tl.load(header + 4)
    number = tl.program_id(1) * LAYOUT.BLOCK + tl.arange(0, LAYOUT.BLOCK)
    token = tl.load(words + ids + number, mask=number < num_ids, other=0)
    tl.store(token_ids + slot * strides.IDS + number, token, mask=number < num_ids)
    for group in range(LAYOUT.GROUPS):
        block = tl.load(words + blocks + group * num_blocks + number, mask=number < num_blocks, other=0)
        place = block_table + slot * strides.BLOCKS + group * strides.GROUP + number
        tl.store(place, block, mask=number < num_blocks)
    if tl.program_id(1) == 0:
        i = tl.arange(0, LAYOUT.PAD)
        is_int, is_float = i < LAYOUT.INTS, i < LAYOUT.FLOATS
        numbers = header + LAYOUT.PLACES + i
        tl.store(ints + i * strides.COLUMN + slot, tl.load(numbers, mask=is_int, other=0), mask=is_int)
        bits = tl.load(numbers + LAYOUT.INTS, mask=is_float, other=0).to(tl.int32)
        tl.store(floats + i * strides.COLUMN + slot, bits.to(tl.float32, bitcast=True), mask=is_float)


def launch(rows: Sequence[SlotRow], columns: SlotColumns) -> None:
    """Write as `reference` does, without waiting for the device."""
    token_ids, block_table, ints, floats = columns
    if not launches(token_ids):
        reference(rows, columns)
        return
    (num_ints, num_slots), num_floats = ints.shape, floats.shape[0]
    _, num_groups, num_columns = block_table.shape
    host, width = _packed(rows, num_ints + num_floats, is_pinned=token_ids.is_cuda)
    packed = host.to(token_ids.device, non_blocking=True)
    longest = max(1, *(max(len(row.ids), len(row.blocks[0])) for row in rows))
    pad = next_power_of_2(max(num_ints, num_floats))
    admit_kernel[(len(rows), cdiv(longest, _BLOCK))](
        packed, packed[len(rows) * width :].view(torch.int32), columns,
        AdmitStrides(num_slots, token_ids.stride(0), block_table.stride(0), num_columns),
        LAYOUT=AdmitLayout(width, _PLACES, num_ints, num_floats, pad, num_groups, _BLOCK), num_warps=4,
    )  # fmt: skip


def _packed(rows: Sequence[SlotRow], num_numbers: int, *, is_pinned: bool) -> tuple[torch.Tensor, int]:
    """Return the buffer and the width of a header."""
    width = _PLACES + num_numbers + (_PLACES + num_numbers) % 2
    size = sum(len(row.ids) + len(row.blocks) * len(row.blocks[0]) for row in rows)
    # Two words at least: the pointer to them is one of memory.
    host = torch.empty(len(rows) * width + max(1, cdiv(size, 2)), dtype=torch.int64, pin_memory=is_pinned)
    numbers = host.numpy()
    headers, words = numbers[: len(rows) * width].reshape(len(rows), width), numbers[len(rows) * width :].view(np.int32)
    at = 0
    for header, (slot, ids, blocks, ints, floats) in zip(headers, rows, strict=True):
        first_block = at + len(ids)
        header[:_PLACES] = slot, at, len(ids), first_block, len(blocks[0])
        header[_PLACES : _PLACES + len(ints)] = ints
        header[_PLACES + len(ints) : _PLACES + num_numbers] = np.array(floats, np.float32).view(np.int32)
        words[at:first_block] = ids
        for of_group in blocks:
            words[first_block : first_block + len(of_group)] = of_group
            first_block += len(of_group)
        at = first_block
    return host, width
