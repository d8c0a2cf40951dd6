"""A runner without tensors, exact about the one thing that matters here: it reads its own KV cache.

Every block is a list of cells holding the id written there. A token is drawn from the ids *read back through the block table*, so a wrong
block table, a block shared and then written, or one given away too early changes the output. `complete` is the independent oracle: the
same function of the plain list of ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from photon_grpc.core.batch import Batch, Fault, StepOutput
from photon_grpc.core.frames import Down, Up
from photon_grpc.core.kv import KVGroup, KVSpec
from photon_grpc.core.stats import Load

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
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.computed = 0
        self.blocks: list[int] = []
        self.seed = 0
        self.index = 0


class Landed:
    def __init__(self, output: StepOutput, read: Callable[[], object] = lambda: None) -> None:
        self._output = output
        self._read = read

    def result(self) -> StepOutput:
        self._read()
        return self._output


class FakeRunner:
    """Computes at submission, in order; `depth` only lets the engine launch before it reads.

    Slots and blocks that an unread step uses may not be given to anybody else, though here it would do no harm.
    """

    def __init__(self, num_blocks: int, block_size: int, depth: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.depth = depth
        self.kv_groups = (KVGroup(KVSpec(1, 1), (0,)),)
        self.cells = [[-1] * block_size for _ in range(num_blocks + 1)]
        self.slots: dict[int, _Slot] = {}
        self.batches: deque[Batch] = deque(maxlen=2000)
        #: Unread step -> its slots, and the blocks it writes.
        self.unread: dict[int, tuple[set[int], set[int]]] = {}
        #: Steps to fail as a whole.
        self.fail_steps: set[int] = set()
        #: Step -> a row that writes NaN; every row that reads it fails.
        self.nan_rows: dict[int, int] = {}

    def submit(self, batch: Batch) -> Landed:
        self.batches.append(batch)
        self._apply(batch)
        self.unread[batch.step] = (
            set(batch.slots),
            {
                block
                for slot, count in zip(batch.slots, batch.counts, strict=True)
                for block in self._written(slot, count)
            },
        )
        if batch.step in self.fail_steps:
            faults = {row: Fault("INTERNAL_FAILURE", "launch failed") for row in range(len(batch.slots))}
            self._skip(batch)
            return self._landed(StepOutput(batch.step, tuple(0 for y in batch.yields if y), faults))
        for row, (slot, count) in enumerate(zip(batch.slots, batch.counts, strict=True)):
            self._write(slot, count, is_nan=self.nan_rows.get(batch.step) == row)
        ids = [self._draw(slot) for slot, yields in zip(batch.slots, batch.yields, strict=True) if yields]
        rows = [row for row, yields in enumerate(batch.yields) if yields]
        faults = {row: Fault("NUMERIC_FAILURE", "NaN") for row, token in zip(rows, ids, strict=True) if token == NAN}
        return self._landed(StepOutput(batch.step, tuple(ids), faults))

    def _landed(self, output: StepOutput) -> Landed:
        return Landed(output, lambda: self.unread.pop(output.step))

    def _written(self, number: int, count: int) -> list[int]:
        slot = self.slots[number]
        last = slot.computed + count - 1
        return slot.blocks[slot.computed // self.block_size : last // self.block_size + 1]

    def _check_unused(self, blocks: Sequence[int]) -> None:
        for _, written in self.unread.values():
            assert written.isdisjoint(blocks), "a block that a step in flight writes was given to another sequence"

    def close(self) -> None:
        pass

    def _apply(self, batch: Batch) -> None:
        for slot in batch.left:
            del self.slots[slot]
        for admission in batch.admissions:
            assert admission.slot not in self.slots, "a slot was given twice"
            assert not any(admission.slot in slots for slots, _ in self.unread.values()), (
                "a slot in flight was given away"
            )
            self._check_unused(admission.blocks[0][-(-admission.num_computed // self.block_size) :])
            slot = self.slots[admission.slot] = _Slot()
            slot.ids, slot.computed = list(admission.ids), admission.num_computed
            slot.blocks = list(admission.blocks[0])
            slot.seed, slot.index = admission.sampling.seed, admission.output_index
        for growth in batch.grown:
            blocks = self.slots[growth.slot].blocks
            assert len(blocks) == growth.offset
            self._check_unused(growth.blocks)
            blocks.extend(growth.blocks)
        self._check_unused([destination for _, destination in batch.copies])
        for source, destination in batch.copies:
            self.cells[destination] = list(self.cells[source])

    def _skip(self, batch: Batch) -> None:
        for number, count, yields in zip(batch.slots, batch.counts, batch.yields, strict=True):
            slot = self.slots[number]
            slot.computed += count
            if yields:
                slot.ids.append(0)

    def _write(self, number: int, count: int, is_nan: bool) -> None:
        slot = self.slots[number]
        for position in range(slot.computed, slot.computed + count):
            block = self.cells[slot.blocks[position // self.block_size]]
            block[position % self.block_size] = NAN if is_nan else slot.ids[position]
        slot.computed += count

    def _draw(self, number: int) -> int:
        slot = self.slots[number]
        assert slot.computed == len(slot.ids), "a row yields before all it knows is computed"
        read = [self.cells[slot.blocks[p // self.block_size]][p % self.block_size] for p in range(slot.computed)]
        token = NAN if NAN in read else next_id(read, slot.seed, slot.index)
        slot.ids.append(token)
        return token


class Post:
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
