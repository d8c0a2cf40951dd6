"""The device's state of every running sequence: one row per slot, changed by a Batch.

Slot 0 is reserved for padding. A decode row needs nothing from the host but its slot: its last token and position are
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.logprobs import LogprobParams
from photon_grpc.kernels import admit
from photon_grpc.kernels.admit import SlotColumns, SlotRow
from photon_grpc.kernels.sampling.bitmask import Constraints
from photon_grpc.kernels.sampling.histogram import Filters
from photon_grpc.kernels.sampling.logprobs import MAX_GIVEN, LogprobMetadata
from photon_grpc.kernels.sampling.penalties import MAX_BIASES, Drafted, Penalties, counted
from photon_grpc.kernels.sampling.process_logits import LogitsProcessing
from photon_grpc.kernels.slot_state import SlotState
from photon_grpc.runner.upload import Numbers, SideCopy, array_to_device, to_device

_Float, _Int = TypeVar("_Float"), TypeVar("_Int")


class SlotNumbers(NamedTuple, Generic[_Float, _Int]):
    """The numbers of a slot beside ids and blocks, or the columns [S] with those of every slot.

    First float32, then int64. num_computed: tokens whose keys and values are written by steps launched so far. seed:
    the bit pattern of the uint64. num_known: as in `SlotState`. num_prompt_best: as num_best, of the prompt. Others: as
    in `SamplingMetadata`, `Constraints`, `Penalties` and `LogprobMetadata` of kernels/sampling.
    """

    temperature: _Float
    top_p: _Float
    min_p: _Float
    repetition_penalty: _Float
    presence_penalty: _Float
    frequency_penalty: _Float
    num_computed: _Int
    top_k: _Int
    seed: _Int
    output_index: _Int
    num_prompt: _Int
    min_length: _Int
    num_best: _Int
    num_prompt_best: _Int
    num_given: _Int
    num_biases: _Int
    is_limited: _Int
    num_known: _Int
    mask_row: _Int


_NUM_FLOATS = 6
_NUM_INTS = len(SlotNumbers._fields) - _NUM_FLOATS


class SlotTable:
    """The state of every slot on the device.

    token_ids: int32 [S, max_model_len], the prompt and sampled ids. block_table: int32 [S, G, max_blocks], of every
    KVGroup; entries before its window stay until they are overwritten. numbers: the columns with one number per slot.
    Other tensors: as in `Constraints`, `Penalties` and `LogprobMetadata` of kernels/sampling.

    Args:
        max_drafts: the most drafts of a row.
    """

    #: Writes admissions.
    write: Callable[[Sequence[SlotRow], SlotColumns], None] = staticmethod(admit.reference)

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        plan: KVPlan,
        vocab_size: int,
        device: torch.device,
        max_drafts: int = 0,
    ) -> None:
        self.device = device
        self.max_drafts = max_drafts
        self.plan = plan
        self.block_size = plan.block_size
        max_blocks = plan.columns(max_model_len)
        self.token_ids = torch.zeros((num_slots, max_model_len), dtype=torch.int32, device=device)
        self.block_table = torch.zeros((num_slots, len(plan.groups), max_blocks), dtype=torch.int32, device=device)
        num_words = -(-vocab_size // 32)
        self.banned_ids = torch.zeros((num_slots, num_words), dtype=torch.int32, device=device)
        self.masks = torch.zeros((num_slots * (1 + max_drafts), num_words), dtype=torch.int32, device=device)
        self.limits = torch.zeros_like(self.banned_ids)
        self.bias_ids = torch.zeros((num_slots, MAX_BIASES), dtype=torch.int32, device=device)
        self.biases = torch.zeros((num_slots, MAX_BIASES), dtype=torch.float32, device=device)
        self.counts = torch.zeros((num_slots, vocab_size), dtype=torch.int16, device=device)
        self.given_ids = torch.zeros((num_slots, MAX_GIVEN), dtype=torch.int32, device=device)
        self._floats = torch.zeros((_NUM_FLOATS, num_slots), dtype=torch.float32, device=device)
        self._ints = torch.zeros((_NUM_INTS, num_slots), dtype=torch.int64, device=device)
        self.numbers: SlotNumbers[torch.Tensor, torch.Tensor] = SlotNumbers(*self._floats, *self._ints)
        self._none_given = torch.zeros_like(self.numbers.num_given)
        self.num_slots = num_slots
        #: Slots whose masks hold in the batch that was applied last, in its order, and the masks of each; None if that
        #: is unknown.
        self._masked: tuple[list[int], int] | None = [], 1
        self._mask_copy = SideCopy(device)
        # Rows of padding have no log-probabilities and no penalties.
        self.numbers.num_best.fill_(-1)
        self.numbers.repetition_penalty.fill_(1.0)
        #: On the host, upper bounds of num_computed, to bound sizes without asking the device: drafts may be refused.
        #: Exact once every step with drafts is read.
        self.max_computed = [0] * num_slots
        #: Slot -> drafts in steps that are not read.
        self.unread_drafts: dict[int, int] = {}
        #: Slots with top_k, top_p or min_p.
        self.filtered: set[int] = set()
        #: Slots whose prompts drafters do not compute.
        self.undrafted: set[int] = set()
        #: Slots with penalties, biases or limits.
        self.processed: set[int] = set()
        #: Slots with banned ids -> the length from which they may be sampled.
        self.banned: dict[int, int] = {}
        #: Slots -> the log-probabilities asked for of their output; of their prompt, with its length.
        self.logprob_params: dict[int, LogprobParams] = {}
        self.prompt_logprob_params: dict[int, tuple[LogprobParams, int]] = {}

    @property
    def state(self) -> SlotState:
        """The state that every step reads and changes."""
        num_known = self.numbers.num_known if self.max_drafts else None
        return SlotState(self.token_ids, self.numbers.num_computed, self.block_table, num_known)

    @property
    def filters(self) -> Filters:
        """top_k, top_p and min_p of every slot."""
        return Filters(self.numbers.top_k, self.numbers.top_p, self.numbers.min_p)

    @property
    def processing(self) -> LogitsProcessing:
        """Penalties, biases, bans, masks and limits of every slot."""
        of = self.numbers
        strengths = of.repetition_penalty, of.presence_penalty, of.frequency_penalty
        return LogitsProcessing(
            Penalties(self.counts, *strengths, of.num_biases, self.bias_ids, self.biases),
            Constraints(of.min_length, self.banned_ids, of.mask_row, self.masks, of.is_limited, self.limits),
            Drafted(of.num_known, self.token_ids, self.token_ids.stride(0)) if self.max_drafts else None,
        )

    def unmasked(self, constraints: Constraints) -> Constraints:
        """Return the constraints without masks."""
        return constraints._replace(mask_row=self._none_given)

    def output_logprobs(self, slots: torch.Tensor) -> LogprobMetadata:
        """Return the requested log-probabilities of ids sampled for these slots."""
        return LogprobMetadata(slots, self.numbers.num_best, self.numbers.num_given, self.given_ids)

    def prompt_logprobs(self, slots: torch.Tensor) -> LogprobMetadata:
        """Return the requested log-probabilities of the ids of their prompts."""
        return LogprobMetadata(slots, self.numbers.num_prompt_best, self._none_given, self.given_ids)

    def mask(self, masks: memoryview) -> None:
        """Limit the masked rows of the last batch applied to the ids whose bits are set.

        `masks` has a bitmask for each, as in `ports.Pending.sample`. Raise IndexError if there are too few or too many.
        The body of the step may have ended by then, so `apply` does all that it can before.
        """
        words = torch.frombuffer(masks, dtype=torch.int32).view(-1, self.masks.shape[1])
        slots, stride = self._masked or ((), 1)
        if len(words) != len(slots) * stride:
            raise IndexError(f"{len(words)} masks for {len(slots)} rows with {stride} each")
        self._mask_copy(words, self.masks[: len(words)])

    def drafts(self, slots: Sequence[int], count: int) -> torch.Tensor:
        """Return int32 [slots, count], the drafts behind the known ids of each slot."""
        rows = self.to_device(slots, torch.int64)[:, None]
        places = self.numbers.num_known[rows] + torch.arange(count, device=self.device)
        return self.token_ids[rows, places.clamp(max=self.token_ids.shape[1] - 1)]

    def give(self, given: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Write drafts, (slot, ids), behind the known ids of their slots."""
        slots = [slot for slot, ids in given for _ in ids]
        numbers = [number for _, ids in given for number in range(len(ids))]
        sent = self.to_device([slots, numbers, [draft for _, ids in given for draft in ids]], torch.int64)
        self.token_ids[sent[0], self.numbers.num_known[sent[0]] + sent[1]] = sent[2].int()

    def apply(self, batch: Batch) -> None:
        """Apply departures, admissions and growth."""
        for slot in batch.left:
            self._forget(slot)
        if batch.admissions:
            self._admit(batch.admissions)
        if batch.grown:
            self._grow(batch)
        masked = [batch.slots[row] for row in batch.masked], batch.drafts + 1
        if batch.masked:
            self._mask_copy.follow()
        if (masked if batch.masked else ([], 1)) != self._masked or (batch.masked and batch.admissions):
            # An admission has set that of its slot to 0.
            self._point_to_masks(*masked)

    def advance(self, batch: Batch) -> None:
        """Advance the host's bounds by a launched step."""
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            self.max_computed[slot] += count
        if batch.drafts:
            for slot, yields in zip(batch.slots, batch.yields, strict=True):
                if yields > 1:
                    self.unread_drafts[slot] = self.unread_drafts.get(slot, 0) + yields - 1
        # Bans need another tail: they are dropped once they cannot apply any more, whatever becomes of drafts.
        if self.banned:
            for slot in [slot for slot, until in self.banned.items() if self.min_computed(slot) + 1 >= until]:
                del self.banned[slot]

    def min_computed(self, slot: int) -> int:
        """Return a lower bound of num_computed, known to the host."""
        return self.max_computed[slot] - self.unread_drafts.get(slot, 0)

    def read(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Correct the host's bounds by what a step with drafts kept: `lengths`, one for each yielding row."""
        kept = iter(lengths)
        for slot, yields in zip(batch.slots, batch.yields, strict=True):
            length = next(kept) if yields else 0
            if yields > 1:
                self.max_computed[slot] -= yields - length
                # On a CPU a step may be read before it is counted.
                self.unread_drafts[slot] = self.unread_drafts.get(slot, 0) - (yields - 1)

    def to_device(self, values: Numbers, dtype: torch.dtype) -> torch.Tensor:
        """Copy numbers of the host without waiting for the device."""
        return to_device(values, dtype, self.device)

    def _forget(self, slot: int) -> None:
        self.filtered.discard(slot)
        self.undrafted.discard(slot)
        self.processed.discard(slot)
        self.banned.pop(slot, None)
        self.logprob_params.pop(slot, None)
        self.prompt_logprob_params.pop(slot, None)

    def _admit(self, admissions: Sequence[Admission]) -> None:
        """Write everything of each slot that can be read, here and on the device.

        All numbers; ids, blocks and given ids as far as the numbers reach, since entries after those are written before
        they are read; the bits of banned ids if `min_length` makes them apply; counts if a penalty reads them.
        """
        rows = [self._row(admission) for admission in admissions]
        self.write(rows, SlotColumns(self.token_ids, self.block_table, self._ints, self._floats))

    def _row(self, admission: Admission) -> SlotRow:
        """Record an admission, write what few requests have, and return what all have."""
        slot = admission.slot
        self._remember(admission)
        if slot in self.banned:
            words = _bitmask(admission.banned_until_min, self.banned_ids.shape[1])
            self.banned_ids[slot] = array_to_device(words, self.device)
        if given := admission.logprobs.token_ids:
            self.given_ids[slot, : len(given)] = self.to_device(given, torch.int32)
        if slot in self.processed:
            self._shape(admission)
        numbers = self._numbers(admission)
        return SlotRow(
            slot, admission.ids, _equally_long(admission.blocks), numbers[_NUM_FLOATS:], numbers[:_NUM_FLOATS]
        )

    def _shape(self, admission: Admission) -> None:
        slot, sampling, num_prompt = admission.slot, admission.sampling, admission.num_prompt
        if sampling.is_penalised:
            ids = admission.ids
            counts = counted(ids[:num_prompt], ids[num_prompt:], self.counts.shape[1])
            self.counts[slot] = array_to_device(counts, self.device)
        if sampling.logit_bias:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            self.bias_ids[slot, : len(ids)] = self.to_device(ids, torch.int32)
            self.biases[slot, : len(ids)] = self.to_device(biases, torch.float32)
        if sampling.allowed_token_ids:
            words = _bitmask(sampling.allowed_token_ids, self.limits.shape[1])
            self.limits[slot] = array_to_device(words, self.device)

    def _remember(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self._forget(slot)
        self.unread_drafts.pop(slot, None)
        self.max_computed[slot] = admission.num_computed
        if not admission.is_drafted:
            self.undrafted.add(slot)
        if not sampling.is_greedy and sampling.is_filtered:
            self.filtered.add(slot)
        if sampling.is_penalised or sampling.logit_bias or sampling.allowed_token_ids:
            self.processed.add(slot)
        until = admission.num_prompt + admission.min_tokens
        if admission.banned_until_min and len(admission.ids) < until:
            self.banned[slot] = until
        if admission.logprobs.num_records:
            self.logprob_params[slot] = admission.logprobs
        if admission.logprobs.num_prompt_records:
            self.prompt_logprob_params[slot] = admission.logprobs, admission.num_prompt

    def _numbers(self, admission: Admission) -> SlotNumbers[float, int]:
        sampling, logprobs = admission.sampling, admission.logprobs
        return SlotNumbers(
            temperature=0.0 if sampling.is_greedy else sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            num_computed=admission.num_computed,
            top_k=sampling.top_k,
            seed=_signed(sampling.seed),
            output_index=admission.output_index,
            num_prompt=admission.num_prompt,
            min_length=self.banned.get(admission.slot, 0),
            num_best=max(logprobs.num_logprobs, 0) if logprobs.num_records else -1,
            num_prompt_best=logprobs.num_prompt_logprobs,
            num_given=len(logprobs.token_ids),
            num_biases=len(sampling.logit_bias),
            is_limited=int(bool(sampling.allowed_token_ids)),
            num_known=len(admission.ids),
            mask_row=0,
        )

    def _point_to_masks(self, slots: list[int], stride: int) -> None:
        # Set once it is sent: if sending fails, the next batch sends again.
        self._masked = None
        self.numbers.mask_row.zero_()
        if slots:
            where, rows = self.to_device([slots, range(1, len(slots) * stride + 1, stride)], torch.int64)
            self.numbers.mask_row.index_copy_(0, where, rows)
        self._masked = (slots, stride) if slots else ([], 1)

    def _grow(self, batch: Batch) -> None:
        num_groups = len(self.plan.groups)
        rows = [growth.slot * num_groups + growth.group for growth in batch.grown for _ in growth.blocks]
        columns = [growth.offset + i for growth in batch.grown for i in range(len(growth.blocks))]
        blocks = [block for growth in batch.grown for block in growth.blocks]
        where = self.to_device(rows, torch.int64), self.to_device(columns, torch.int64)
        self.block_table.flatten(0, 1)[where] = self.to_device(blocks, torch.int32)


def _equally_long(groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Pad with block 0 to equal length."""
    longest = max(map(len, groups))
    return [(*blocks, *(0,) * (longest - len(blocks))) for blocks in groups]


def _bitmask(ids: Sequence[int], num_words: int) -> npt.NDArray[np.int32]:
    """Return a bitmask with the bits of these ids set."""
    numbers = np.array(ids)
    words = np.zeros(num_words, dtype=np.uint32)
    np.bitwise_or.at(words, numbers // 32, np.left_shift(1, numbers % 32).astype(np.uint32))
    return words.view(np.int32)


def _signed(value: int) -> int:
    """Return the int64 with the bit pattern of this uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value
