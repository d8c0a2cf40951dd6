"""What the device knows about every sequence that has a seat: one row per slot, changed when a Batch says so.

Slot 0 is reserved for padding. A decode row needs nothing from the host but its slot: its last token and position are here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from photon_grpc.core.batch import Admission, Batch


class SlotTable:
    """
    token_ids: int32 [S, max_model_len], prompt and what was drawn.
    num_computed: int64 [S], tokens whose keys and values are written (by steps launched so far).
    block_table: int32 [S, max_blocks].
    temperature, top_p, min_p: float32 [S]; top_k, seed (bit pattern of the uint64), output_index, num_prompt: int64 [S].
    min_length: int64 [S], length below which the ids marked in banned_ids, bool [S, V], cannot be drawn.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device
    ) -> None:
        self.device = device
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.num_computed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.block_table = torch.zeros((num_slots, max_blocks), dtype=torch.int32, device=device)
        self.banned_ids = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._floats = torch.zeros((3, num_slots), dtype=torch.float32, device=device)
        self._ints = torch.zeros((5, num_slots), dtype=torch.int64, device=device)
        self.temperature, self.top_p, self.min_p = self._floats
        self.top_k, self.seed, self.output_index, self.num_prompt, self.min_length = self._ints
        #: Host mirror of num_computed, to bound sizes without asking the device.
        self.launched = [0] * num_slots
        #: Slots whose sampling is more than an argmax, and more than that plus noise.
        self.drawing: set[int] = set()
        self.filtered: set[int] = set()
        #: Slots with banned ids -> the length from which they may be drawn.
        self.banned: dict[int, int] = {}

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
            self.launched[slot] += count
        # Bans take the widest tail: they are dropped as soon as they cannot apply any more.
        for slot in [slot for slot, until in self.banned.items() if self.launched[slot] + 1 >= until]:
            del self.banned[slot]

    def to_device(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """A column of host numbers, copied without waiting for the device."""
        host = torch.tensor(values, dtype=dtype)
        return host if self.device.type == "cpu" else host.pin_memory().to(self.device, non_blocking=True)

    def _forget(self, slot: int) -> None:
        self.drawing.discard(slot)
        self.filtered.discard(slot)
        self.banned.pop(slot, None)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            self._remember(admission)
            self.token_ids[admission.slot, : len(admission.ids)] = self.to_device(admission.ids, torch.int32)
            blocks = admission.blocks[0]
            self.block_table[admission.slot, : len(blocks)] = self.to_device(blocks, torch.int32)
        slots = self.to_device([a.slot for a in admissions], torch.int64)
        self.num_computed[slots] = self.to_device([a.num_computed for a in admissions], torch.int64)
        samplings = [a.sampling for a in admissions]
        floats = itertools.chain.from_iterable(
            zip(*((s.temperature, s.top_p, s.min_p) for s in samplings), strict=True)
        )
        ints = itertools.chain.from_iterable(
            zip(
                *(
                    (
                        a.sampling.top_k,
                        _signed(a.sampling.seed),
                        a.output_index,
                        a.num_prompt,
                        a.num_prompt + a.min_tokens,
                    )
                    for a in admissions
                ),
                strict=True,
            )
        )
        self._floats[:, slots] = self.to_device(list(floats), torch.float32).view(3, -1)
        self._ints[:, slots] = self.to_device(list(ints), torch.int64).view(5, -1)

    def _remember(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self._forget(slot)
        self.launched[slot] = admission.num_computed
        if not sampling.is_greedy:
            self.drawing.add(slot)
            if sampling.is_filtered:
                self.filtered.add(slot)
        until = admission.num_prompt + admission.min_tokens
        if admission.banned_until_min and len(admission.ids) < until:
            self.banned[slot] = until
            self.banned_ids[slot].zero_()
            self.banned_ids[slot].index_fill_(0, self.to_device(admission.banned_until_min, torch.int64), True)

    def _grow(self, batch: Batch) -> None:
        slots = [growth.slot for growth in batch.grown for _ in growth.blocks]
        columns = [growth.offset + i for growth in batch.grown for i in range(len(growth.blocks))]
        blocks = [block for growth in batch.grown for block in growth.blocks]
        where = self.to_device(slots, torch.int64), self.to_device(columns, torch.int64)
        self.block_table[where] = self.to_device(blocks, torch.int32)


def _signed(value: int) -> int:
    """The int64 with the bit pattern of this uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value
