"""What the device knows about every sequence that has a seat: one row per slot, changed when a Batch says so.

Slot 0 is reserved for padding. A decode row needs nothing from the host but its slot: its last token and position are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.kv import KVPlan
from photon_grpc.kernels.slot_state import SlotState
from photon_grpc.runner.upload import Numbers, to_device


class _Numbers(NamedTuple):
    """What a slot holds beside ids and blocks: first the float32 columns, then those of int64, in their order."""

    temperature: float
    top_p: float
    min_p: float
    num_computed: int
    top_k: int
    seed: int
    output_index: int
    num_prompt: int
    min_length: int


_NUM_FLOATS = 3
_NUM_INTS = len(_Numbers._fields) - _NUM_FLOATS


class SlotTable:
    """
    token_ids: int32 [S, max_model_len], prompt and what was drawn.
    num_computed: int64 [S], tokens whose keys and values are written (by steps launched so far).
    block_table: int32 [S, max_blocks].
    temperature, top_p, min_p: float32 [S]; top_k, seed (bit pattern of the uint64), output_index, num_prompt: int64 [S].
    min_length: int64 [S], length below which the ids marked in banned_ids, bool [S, V], cannot be drawn; 0 where none is marked.
    """

    def __init__(self, num_slots: int, max_model_len: int, plan: KVPlan, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.plan = plan
        self.block_size = plan.block_size
        max_blocks = plan.columns(max_model_len)
        self.token_ids = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.block_table = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device)
        self.banned_ids = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._floats = torch.zeros((_NUM_FLOATS, num_slots), dtype=torch.float32, device=device)
        self._ints = torch.zeros((_NUM_INTS, num_slots), dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p = self._floats
        self.num_computed, self.top_k, self.seed, self.output_index, self.num_prompt, self.min_length = self._ints
        #: On the host, upper bounds of num_computed, to bound sizes without asking the device: drafts may be refused.
        self.max_computed = [0] * num_slots
        #: Slots whose sampling is more than an argmax, and more than that plus noise.
        self.drawing: set[int] = set()
        self.filtered: set[int] = set()
        #: Slots with banned ids -> the length from which they may be drawn.
        self.banned: dict[int, int] = {}

    @property
    def state(self) -> SlotState:
        """What every step reads and changes."""
        return SlotState(self.token_ids, self.num_computed, self.block_table)

    def apply(self, batch: Batch) -> None:
        """Who left, who came, whose table grew."""
        for slot in batch.left:
            self._forget(slot)
        if batch.admissions:
            self._admit(batch.admissions)
        if batch.grown:
            self._grow(batch)

    def advance(self, batch: Batch) -> None:
        """The host's side of a launched step."""
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            self.max_computed[slot] += count
        # Bans take another tail: they are dropped as soon as they cannot apply any more.
        for slot in [slot for slot, until in self.banned.items() if self.max_computed[slot] + 1 >= until]:
            del self.banned[slot]

    def to_device(self, values: Numbers, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the host, copied without waiting for the device."""
        return to_device(values, dtype, self.device)

    def _forget(self, slot: int) -> None:
        self.drawing.discard(slot)
        self.filtered.discard(slot)
        self.banned.pop(slot, None)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        """Writes all of each slot that can be read, here and on the device: every number; ids and blocks as far as the numbers reach, since
        what lies behind is written before it is read; marks of banned ids where `min_length` says that they hold."""
        slots = self.to_device([admission.slot for admission in admissions], torch.int64)
        for admission in admissions:
            slot, blocks = admission.slot, admission.blocks[0]
            self._remember(admission)
            self.token_ids[slot, : len(admission.ids)] = self.to_device(admission.ids, torch.int32)
            self.block_table[slot, : len(blocks)] = self.to_device(blocks, torch.int32)
            if slot in self.banned:
                self.banned_ids[slot].zero_().index_fill_(
                    0, self.to_device(admission.banned_until_min, torch.int64), True
                )
        rows = [self._numbers(admission) for admission in admissions]
        floats = self.to_device([row[:_NUM_FLOATS] for row in rows], torch.float32)
        ints = self.to_device([row[_NUM_FLOATS:] for row in rows], torch.int64)
        self._floats[:, slots], self._ints[:, slots] = floats.T, ints.T

    def _remember(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self._forget(slot)
        self.max_computed[slot] = admission.num_computed
        if not sampling.is_greedy:
            self.drawing.add(slot)
            if sampling.is_filtered:
                self.filtered.add(slot)
        until = admission.num_prompt + admission.min_tokens
        if admission.banned_until_min and len(admission.ids) < until:
            self.banned[slot] = until

    def _numbers(self, admission: Admission) -> _Numbers:
        sampling = admission.sampling
        return _Numbers(
            temperature=0.0 if sampling.is_greedy else sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            num_computed=admission.num_computed,
            top_k=sampling.top_k,
            seed=_signed(sampling.seed),
            output_index=admission.output_index,
            num_prompt=admission.num_prompt,
            min_length=self.banned.get(admission.slot, 0),
        )

    def _grow(self, batch: Batch) -> None:
        slots = [growth.slot for growth in batch.grown for _ in growth.blocks]
        columns = [growth.offset + i for growth in batch.grown for i in range(len(growth.blocks))]
        blocks = [block for growth in batch.grown for block in growth.blocks]
        where = self.to_device(slots, torch.int64), self.to_device(columns, torch.int64)
        self.block_table[where] = self.to_device(blocks, torch.int32)


def _signed(value: int) -> int:
    """The int64 with the bit pattern of this uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value
