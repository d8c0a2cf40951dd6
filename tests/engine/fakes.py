"""A runner without tensors, exact about the one thing that matters here: it reads its own KV cache.

Every block is a list of cells holding the id written there. A token is drawn from the ids *read back through the block
tables*, of a group with a window as far as it reaches, so a wrong block table, a block shared and then written, or one
given away too early changes the output. `complete` is the independent oracle: the same function of the plain list of
ids. Drafts are written into cells and stay there when they are not kept; of what the masks allow the first id from
`next_id` on is drawn. Scores, too, are those of `tests.engine.scored` for the ids that are read back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

from photon_grpc.core.batch import FAULTS, NAN_LOGITS, NOTHING_TO_SAMPLE, Admission, Batch, Growth, StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Down, Up
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.logprobs import NO_LOGPROBS
from photon_grpc.core.ports import Event, Pending
from photon_grpc.core.stats import Load
from photon_grpc.runner.poisoned_slots import PoisonedSlots, UnpoisonedRows
from tests.engine import scored
from tests.engine.pages import NAN, Pages
from tests.engine.tables import Table

VOCAB = scored.VOCAB
MASK_BYTES = 4 * -(-VOCAB // 32)


def next_id(ids: Sequence[int], seed: int = 0, index: int = 0) -> int:
    """Return the id that follows `ids`."""
    state = seed * 31 + index * 17 + 7
    for token in ids:
        state = (state * 1103515245 + token + 12345) % (1 << 31)
    return state % VOCAB


def draw(ids: Sequence[int], seed: int, index: int, allows: Callable[[int], bool]) -> int:
    """Of the ids that may be drawn the first from `next_id` on."""
    first = next_id(ids, seed, index)
    return next((token for token in (*range(first, VOCAB), *range(first)) if allows(token)), NOTHING_TO_SAMPLE)


def complete(
    prompt: Sequence[int],
    num_tokens: int,
    seed: int = 0,
    index: int = 0,
    stop: frozenset[int] = frozenset(),
    table: Table | None = None,
) -> list[int]:
    """Return the whole output; a shorter one if the table leaves nothing to sample."""
    ids: list[int] = []
    for _ in range(num_tokens):
        token = _follow([*prompt, *ids], len(prompt), seed, index, table)
        if token == NOTHING_TO_SAMPLE:
            break
        ids.append(token)
        if token in stop or (table is not None and table.is_complete(ids)):
            break
    return ids


def _follow(ids: Sequence[int], num_prompt: int, seed: int, index: int, table: Table | None) -> int:
    if table is None:
        return next_id(ids, seed, index)
    return draw(ids, seed, index, table.allowed(ids[num_prompt:]).__contains__)


class _Slot:
    """What the table says of a slot; stays as it is until a change is applied."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.computed = 0
        #: Per KVGroup.
        self.blocks: list[list[int]] = []
        self.num_prompt = 0
        self.seed = 0
        self.index = 0
        self.logprobs = NO_LOGPROBS


@dataclass
class _SlotView:
    """A slot as the scheduler sees it."""

    #: Per KVGroup.
    blocks: list[list[int]]
    #: Tokens launched if every draft is refused.
    least: int


class FinishedStep:
    """A step that could not be launched, or is computed."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def drafts(self) -> tuple[int, ...]:
        return ()

    def sample(self, masks: memoryview) -> None:
        pass

    def result(self) -> StepOutput:
        return self._output


class _Open:
    """A step whose body is computed. `tail` draws: at once, or with the masks."""

    def __init__(self, batch: Batch, drafts: list[list[int]], tail: Callable[[list[bytes]], StepOutput]) -> None:
        self._batch = batch
        self._drafts = drafts
        self._tail = tail
        self._output = None if batch.masked else tail([])

    def drafts(self) -> tuple[int, ...]:
        k = self._batch.drafts
        return tuple(draft for row in self._batch.masked for draft in [*self._drafts[row], *[-1] * k][:k])

    def sample(self, masks: memoryview) -> None:
        assert self._output is None, "sampled twice, or though no row is masked"
        assert len(masks) == len(self._batch.masked) * (self._batch.drafts + 1) * MASK_BYTES
        self._output = self._tail([bytes(masks[at : at + MASK_BYTES]) for at in range(0, len(masks), MASK_BYTES)])

    def result(self) -> StepOutput:
        assert self._output is not None, "read before the masks came"
        return self._output


class _Unread:
    """Between the engine and a step: notes that it was read."""

    def __init__(self, pending: Pending, read: Callable[[StepOutput], object]) -> None:
        self.drafts, self.sample = pending.drafts, pending.sample
        self._pending = pending
        self._read = read

    def result(self) -> StepOutput:
        output = self._pending.result()
        self._read(output)
        return output


class FakeRunner:
    """Computes at submission, or samples when the masks come, in order.

    `depth` only allows the engine to launch before it reads. Slots and blocks that an unread step uses may not be given
    to another sequence, though here it would do no harm. A step that is to fail applies part of its changes; later rows
    read and write through whatever the table then has for their slots.
    """

    def __init__(self, plan: KVPlan, num_blocks: int, depth: int = 0) -> None:
        self.kv = plan
        self.num_blocks = num_blocks
        self.depth = depth
        self.pages = Pages(plan, num_blocks)
        self.slots: defaultdict[int, _Slot] = defaultdict(_Slot)
        #: What the scheduler believes of every slot, whether it was applied or not.
        self.views: dict[int, _SlotView] = {}
        self.batches: deque[Batch] = deque(maxlen=2000)
        #: Unread step -> its slots, and the blocks it reads or writes.
        self.unread: dict[int, tuple[set[int], set[int]]] = {}
        #: Step to fail as a whole -> how many of its changes are applied before it does.
        self.fail_steps: dict[int, int] = {}
        #: Step -> a row that writes NaN; every row that reads it fails.
        self.nan_rows: dict[int, int] = {}
        #: Steps whose tail fails as a whole.
        self.fail_tails: set[int] = set()
        #: How far each next draft lies from what will be drawn; 0 is kept.
        self.misses: Iterator[int] = repeat(0)
        #: Seed -> the table that a draft obeys; what is drawn obeys the masks alone.
        self.tables: dict[int, Table] = {}
        #: Drafts that were verified, and those kept.
        self.num_drafts = self.num_kept = 0
        self._poisoned = PoisonedSlots()

    def submit(self, batch: Batch) -> Pending:
        self.batches.append(batch)
        self._check(batch)
        views = [self.views[number] for number in batch.slots]
        self.unread[batch.step] = (set(batch.slots), self._launched(batch, views))
        sound = self._poisoned.unpoisoned(batch)
        pending = self._compute(sound)
        whole = pending if sound is batch else UnpoisonedRows(pending, batch, sound)
        return _Unread(whole, partial(self._read, batch, views))

    def _read(self, batch: Batch, views: list[_SlotView], output: StepOutput) -> None:
        del self.unread[batch.step]
        lengths = iter(output.lengths or repeat(1))
        for view, yields in zip(views, batch.yields, strict=True):
            if yields:
                length = next(lengths)
                assert length <= yields
                view.least += length - 1

    def close(self) -> None:
        pass

    def _check(self, batch: Batch) -> None:
        """Assert that the scheduler may assign these slots and blocks."""
        for slot in batch.left:
            del self.views[slot]
        for admission in batch.admissions:
            assert admission.slot not in self.views, "a slot was given twice"
            assert not any(admission.slot in slots for slots, _ in self.unread.values()), (
                "a slot in flight was given away"
            )
            num_computed = admission.num_computed
            for group in admission.blocks:
                self._check_unused(group[self.kv.columns(num_computed) :])
            self.views[admission.slot] = _SlotView(list(map(list, admission.blocks)), num_computed)
        for growth in batch.grown:
            blocks = self.views[growth.slot].blocks[growth.group]
            assert len(blocks) == growth.offset
            self._check_unused(growth.blocks)
            blocks.extend(growth.blocks)
        self._check_unused([destination for _, destination in batch.copies])

    def _check_unused(self, blocks: Sequence[int]) -> None:
        for _, touched in self.unread.values():
            assert touched.isdisjoint(blocks), "a block that a step in flight touches was given to another sequence"

    def _launched(self, batch: Batch, views: list[_SlotView]) -> set[int]:
        """Return the blocks that the rows may read or write, whatever becomes of drafts.

        These are the blocks of each group's table from the start of the window of the first computed token.
        """
        touched: set[int] = set()
        for view, count, yields in zip(views, batch.counts, batch.yields, strict=True):
            assert yields <= 1 + batch.drafts
            for group, blocks in zip(self.kv.groups, view.blocks, strict=True):
                touched.update(blocks[self.kv.behind(group.window, view.least) :])
            view.least += count - max(yields - 1, 0)
        return touched - {0}

    def _compute(self, batch: Batch) -> Pending:
        changes = self._changes(batch)
        for change in changes[: self.fail_steps.get(batch.step)]:
            change()
        if batch.step in self.fail_steps:
            return FinishedStep(self._failed(batch))
        firsts = [self.slots[number].computed for number in batch.slots]
        drafts = [self._draft(slot, yields - 1) for slot, yields in zip(batch.slots, batch.yields, strict=True)]
        for row, slot in enumerate(batch.slots):
            given = dict(batch.given).get(slot, ())
            drafts[row] = [*given, *drafts[row][len(given) :]]
            assert len(drafts[row]) == max(batch.yields[row] - 1, 0)
        for row, (slot, count) in enumerate(zip(batch.slots, batch.counts, strict=True)):
            self._write(slot, count, drafts[row], is_nan=self.nan_rows.get(batch.step) == row)
        for row, (slot, count) in enumerate(zip(batch.slots, batch.counts, strict=True)):
            self._attend(slot, count, drafts[row])
        prompt_scores = {
            row: self._score_prompt(batch.slots[row], firsts[row], first) for row, first in batch.prompt_logprob_rows
        }
        return _Open(batch, drafts, partial(self._tail, batch, drafts, prompt_scores))

    def _failed(self, batch: Batch) -> StepOutput:
        self._poisoned.failed(batch)
        faults = {row: Fault("INTERNAL_FAILURE", "launch failed") for row in range(len(batch.slots))}
        return StepOutput(batch.step, tuple(0 for y in batch.yields if y), faults)

    def _tail(
        self, batch: Batch, drafts: list[list[int]], prompt_scores: dict[int, bytes], masks: list[bytes]
    ) -> StepOutput:
        if batch.step in self.fail_tails:
            return self._failed(batch)
        stride = batch.drafts + 1
        masks_of = {row: masks[at * stride : (at + 1) * stride] for at, row in enumerate(batch.masked)}
        kept = {
            row: self._keep(batch.slots[row], drafts[row], masks_of.get(row))
            for row, yields in enumerate(batch.yields)
            if yields
        }
        faults = {row: FAULTS[ids[0]] for row, ids in kept.items() if ids[0] < 0}
        scores = {row: self._score(batch.slots[row], ids) for row, ids in kept.items() if row not in faults}
        for row in faults:
            # Ids of such a row mean nothing, however many there are.
            kept[row] = kept[row] * batch.yields[row]
        lengths = tuple(len(ids) for ids in kept.values()) if batch.drafts else ()
        return StepOutput(
            batch.step,
            tuple(token for ids in kept.values() for token in ids),
            faults,
            lengths=lengths,
            logprobs={row: records for row, records in scores.items() if records},
            prompt_logprobs={row: records for row, records in prompt_scores.items() if row not in faults},
        )

    def _score(self, number: int, kept: list[int]) -> bytes:
        slot = self.slots[number]
        if not slot.logprobs.num_records:
            return b""
        best, given = max(slot.logprobs.num_logprobs, 0), slot.logprobs.token_ids
        read = [self.pages.read(slot.blocks, slot.ids[:at]) for at in range(len(slot.ids) - len(kept), len(slot.ids))]
        return b"".join(scored.position(before, token, best, given) for before, token in zip(read, kept, strict=True))

    def _score_prompt(self, number: int, begin: int, first: int) -> bytes:
        """Of a row that has computed from position `begin` on."""
        slot = self.slots[number]
        last = min(slot.computed, slot.num_prompt - 1)
        assert begin < first <= last, "a row is to score what it does not compute"
        read = [self.pages.read(slot.blocks, slot.ids[:at]) for at in range(first, last + 1)]
        tokens = slot.ids[first : last + 1]
        return b"".join(
            scored.position(before, token, slot.logprobs.num_prompt_logprobs)
            for before, token in zip(read, tokens, strict=True)
        )

    def _changes(self, batch: Batch) -> list[Callable[[], None]]:
        """One by one, in the order in which they are to be applied."""
        return [
            *(partial(self._admit, admission) for admission in batch.admissions),
            *(partial(self._grow, growth) for growth in batch.grown),
            *(partial(self.pages.copy, *pair) for pair in batch.copies),
        ]

    def _admit(self, admission: Admission) -> None:
        slot = self.slots[admission.slot]
        slot.ids, slot.computed = list(admission.ids), admission.num_computed
        slot.blocks = list(map(list, admission.blocks))
        slot.num_prompt, slot.seed, slot.index = admission.num_prompt, admission.sampling.seed, admission.output_index
        slot.logprobs = admission.logprobs

    def _grow(self, growth: Growth) -> None:
        self.slots[growth.slot].blocks[growth.group][growth.offset :] = growth.blocks

    def _draft(self, number: int, count: int) -> list[int]:
        slot, drafts = self.slots[number], []
        for _ in range(count):
            ids = [*slot.ids, *drafts]
            token = _follow(ids, slot.num_prompt, slot.seed, slot.index, self.tables.get(slot.seed))
            drafts.append((max(token, 0) + next(self.misses)) % VOCAB)
        return drafts

    def _write(self, number: int, count: int, drafts: list[int], is_nan: bool) -> None:
        slot = self.slots[number]
        ids = [*slot.ids, *drafts]
        columns = self.pages.columns(slot.computed, slot.computed + count - 1)
        for group, own in zip(slot.blocks, self.views[number].blocks, strict=True):
            assert 0 not in group[columns] and set(group[columns]) <= set(own), (
                "a row writes into a block that is not its own"
            )
        for position in range(slot.computed, slot.computed + count):
            self.pages.write(slot.blocks, position, NAN if is_nan else ids[position])
        slot.computed += count

    def _attend(self, number: int, count: int, drafts: list[int]) -> None:
        slot = self.slots[number]
        for position in range(slot.computed - count, slot.computed):
            self.pages.attend(slot.blocks, [*slot.ids, *drafts], position)

    def _keep(self, number: int, drafts: list[int], masks: list[bytes] | None) -> list[int]:
        """Return the ids that a row yields: after its last id, and after every draft that equals the id kept there."""
        slot, known, kept = self.slots[number], len(self.slots[number].ids), []
        assert slot.computed == known + len(drafts), "a row yields before all it knows is computed"
        ids = [*slot.ids, *drafts]
        for j, draft in enumerate([*drafts, -1]):
            token = self._drawn(slot, self.pages.read(slot.blocks, ids[: known + j]), masks and masks[j])
            if token < 0 and kept:
                break
            kept.append(token)
            if token != draft:
                break
        self.num_drafts += len(drafts)
        self.num_kept += len(kept) - 1
        slot.ids += kept
        slot.computed = known + len(kept) - 1
        return kept

    def _drawn(self, slot: _Slot, read: list[int], mask: bytes | None) -> int:
        if NAN in read:
            return NAN_LOGITS
        if mask is None:
            return next_id(read, slot.seed, slot.index)
        return draw(read, slot.seed, slot.index, lambda token: bool(mask[token // 8] >> token % 8 & 1))


class FakeBridge:
    """Inbox, outbox and heartbeat in one: frames put in are drained, frames sent and beats are kept."""

    def __init__(self) -> None:
        self.inbox: list[tuple[int, Down | Event]] = []
        self.sent: list[tuple[int, Up]] = []
        #: Told to every front end.
        self.loads: list[Load] = []
        self.waits: list[float | None] = []
        #: (allowance_s, num_tokens)
        self.beats: list[tuple[float, int]] = []

    def put(self, frame: Down, frontend: int = 0) -> None:
        self.inbox.append((frontend, frame))

    def wake(self, event: Event) -> None:
        self.inbox.append((-1, event))

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down | Event]]:
        self.waits.append(timeout_s)
        frames, self.inbox = self.inbox, []
        if not frames and timeout_s is None:
            raise EOFError
        return frames

    def send(self, frontend: int, frame: Up) -> None:
        self.sent.append((frontend, frame))

    def broadcast(self, load: Load) -> None:
        self.loads.append(load)

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        self.beats.append((allowance_s, num_tokens))


class FakeRecorder:
    """Plain books of what is in flight: which request had which slot in every launched, unread step."""

    def __init__(self) -> None:
        self.known = b""
        self._taken_in = b""
        #: Slot -> fingerprint, step before the first token.
        self._slots: dict[int, tuple[bytes, int]] = {}
        self._steps: dict[int, list[tuple[bytes, int]]] = {}

    def receiving(self, fingerprint: bytes) -> None:
        self._taken_in = fingerprint

    def received(self) -> None:
        self._taken_in = b""

    def admitted(self, slot: int, since_step: int, fingerprint: bytes) -> None:
        self._slots[slot] = fingerprint, since_step

    def launching(self, step: int, slots: tuple[int, ...]) -> None:
        self._steps[step] = [self._slots[slot] for slot in slots]

    def settled(self, step: int) -> None:
        self._steps = {other: rows for other, rows in self._steps.items() if other > step}

    def remember(self, known: bytes) -> None:
        self.known = known

    def in_flight(self) -> dict[bytes, int]:
        if self._taken_in:
            return {self._taken_in: 0}
        suspects: dict[bytes, int] = {}
        for step, rows in self._steps.items():
            for fingerprint, since_step in rows:
                suspects[fingerprint] = max(suspects.get(fingerprint, 0), step - since_step)
        return suspects
