"""A runner without tensors, exact about the one thing that matters here: it reads its own KV cache.

Every block is a list of cells holding the id written there. A token is drawn from the ids *read back through the block table*, so a wrong
block table, a block shared and then written, or one given away too early changes the output. `complete` is the independent oracle: the
same function of the plain list of ids.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from photon_grpc.core.batch import Admission, Batch, Growth, StepOutput
from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Down, Up
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import Pending
from photon_grpc.core.stats import Load
from photon_grpc.runner.poisoned_slots import PoisonedSlots, SoundRows

VOCAB = 97
#: In a cell: what was written there is no number.
NAN = -2


def next_id(ids: Sequence[int], seed: int = 0, index: int = 0) -> int:
    """The id that follows `ids`."""
    state = seed * 31 + index * 17 + 7
    for token in ids:
        state = (state * 1103515245 + token + 12345) % (1 << 31)
    return state % VOCAB


def complete(
    prompt: Sequence[int], num_tokens: int, seed: int = 0, index: int = 0, stop: frozenset[int] = frozenset()
) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_id(ids, seed, index))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


class _Slot:
    """What the table says of a slot; stays as it is until a change is applied."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.computed = 0
        self.blocks: list[int] = []
        self.seed = 0
        self.index = 0


@dataclass
class _Seat:
    blocks: list[int]
    launched: int


class Landed:
    def __init__(self, output: StepOutput, read: Callable[[], object] = lambda: None) -> None:
        self._output = output
        self._read = read

    def result(self) -> StepOutput:
        self._read()
        return self._output


class FakeRunner:
    """Computes at submission, in order; `depth` only lets the engine launch before it reads.

    Slots and blocks that an unread step uses may not be given to anybody else, though here it would do no harm. A step that is to fail
    applies part of its changes, and rows that are computed then read and write through whatever the table says of their slots.
    """

    def __init__(self, plan: KVPlan, num_blocks: int, depth: int = 0) -> None:
        self.kv = plan
        self.num_blocks = num_blocks
        self.block_size = block_size = plan.block_size
        self.depth = depth
        self.cells = [[-1] * block_size for _ in range(num_blocks + 1)]
        self.slots: defaultdict[int, _Slot] = defaultdict(_Slot)
        #: What the scheduler believes of every slot, whether it was applied or not.
        self.seats: dict[int, _Seat] = {}
        self.batches: deque[Batch] = deque(maxlen=2000)
        #: Unread step -> its slots, and the blocks it writes.
        self.unread: dict[int, tuple[set[int], set[int]]] = {}
        #: Step to fail as a whole -> how many of its changes are applied before it does.
        self.fail_steps: dict[int, int] = {}
        #: Step -> a row that writes NaN; every row that reads it fails.
        self.nan_rows: dict[int, int] = {}
        self._poisoned = PoisonedSlots()

    def submit(self, batch: Batch) -> Pending:
        self.batches.append(batch)
        self._check(batch)
        self.unread[batch.step] = (set(batch.slots), self._launched(batch))
        sound = self._poisoned.sound(batch)
        pending = self._compute(sound)
        return Landed(SoundRows(pending, batch, sound).result(), lambda: self.unread.pop(batch.step))

    def close(self) -> None:
        pass

    def _check(self, batch: Batch) -> None:
        """Whether the scheduler may give what it gives."""
        for slot in batch.left:
            del self.seats[slot]
        for admission in batch.admissions:
            assert admission.slot not in self.seats, "a slot was given twice"
            assert not any(admission.slot in slots for slots, _ in self.unread.values()), (
                "a slot in flight was given away"
            )
            self._check_unused(admission.blocks[0][self.kv.columns(admission.num_computed) :])
            self.seats[admission.slot] = _Seat(list(admission.blocks[0]), admission.num_computed)
        for growth in batch.grown:
            blocks = self.seats[growth.slot].blocks
            assert len(blocks) == growth.offset
            self._check_unused(growth.blocks)
            blocks.extend(growth.blocks)
        self._check_unused([destination for _, destination in batch.copies])

    def _check_unused(self, blocks: Sequence[int]) -> None:
        for _, written in self.unread.values():
            assert written.isdisjoint(blocks), "a block that a step in flight writes was given to another sequence"

    def _launched(self, batch: Batch) -> set[int]:
        """The blocks that the scheduler has the rows write."""
        written: set[int] = set()
        for number, count in zip(batch.slots, batch.counts, strict=True):
            seat = self.seats[number]
            first, last = seat.launched, seat.launched + count - 1
            written.update(seat.blocks[first // self.block_size : last // self.block_size + 1])
            seat.launched += count
        return written

    def _compute(self, batch: Batch) -> Landed:
        changes = self._changes(batch)
        for change in changes[: self.fail_steps.get(batch.step)]:
            change()
        if batch.step in self.fail_steps:
            self._poisoned.failed(batch)
            faults = {row: Fault("INTERNAL_FAILURE", "launch failed") for row in range(len(batch.slots))}
            return Landed(StepOutput(batch.step, tuple(0 for y in batch.yields if y), faults))
        for row, (slot, count) in enumerate(zip(batch.slots, batch.counts, strict=True)):
            self._write(slot, count, is_nan=self.nan_rows.get(batch.step) == row)
        ids = [self._draw(slot) for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields]
        rows = [row for row, yields in enumerate(batch.yields) if yields]
        faults = {row: Fault("NUMERIC_FAILURE", "NaN") for row, token in zip(rows, ids, strict=True) if token == NAN}
        return Landed(StepOutput(batch.step, tuple(ids), faults))

    def _changes(self, batch: Batch) -> list[Callable[[], None]]:
        """One by one, in the order in which they are to be applied."""
        return [
            *(partial(self._admit, admission) for admission in batch.admissions),
            *(partial(self._grow, growth) for growth in batch.grown),
            *(partial(self._copy, *pair) for pair in batch.copies),
        ]

    def _admit(self, admission: Admission) -> None:
        slot = self.slots[admission.slot]
        slot.ids, slot.computed = list(admission.ids), admission.num_computed
        slot.blocks = list(admission.blocks[0])
        slot.seed, slot.index = admission.sampling.seed, admission.output_index

    def _grow(self, growth: Growth) -> None:
        self.slots[growth.slot].blocks[growth.offset :] = growth.blocks

    def _copy(self, source: int, destination: int) -> None:
        self.cells[destination] = list(self.cells[source])

    def _write(self, number: int, count: int, is_nan: bool) -> None:
        slot = self.slots[number]
        for position in range(slot.computed, slot.computed + count):
            block = slot.blocks[position // self.block_size]
            assert block in self.seats[number].blocks, "a row writes into a block that is not its own"
            self.cells[block][position % self.block_size] = NAN if is_nan else slot.ids[position]
        slot.computed += count

    def _draw(self, number: int) -> int:
        slot = self.slots[number]
        assert slot.computed == len(slot.ids), "a row yields before all it knows is computed"
        read = [self.cells[slot.blocks[p // self.block_size]][p % self.block_size] for p in range(slot.computed)]
        token = NAN if NAN in read else next_id(read, slot.seed, slot.index)
        slot.ids.append(token)
        return token


class FakeBridge:
    """Inbox, outbox and heartbeat in one: frames put in are drained, frames sent and beats are kept."""

    def __init__(self) -> None:
        self.inbox: list[tuple[int, Down]] = []
        self.sent: list[tuple[int, Up]] = []
        #: Told to every front end.
        self.loads: list[Load] = []
        self.waits: list[float | None] = []
        #: (allowance_s, num_tokens)
        self.beats: list[tuple[float, int]] = []

    def put(self, frame: Down, frontend: int = 0) -> None:
        self.inbox.append((frontend, frame))

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down]]:
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
