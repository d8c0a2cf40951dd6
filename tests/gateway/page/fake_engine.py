"""An engine that only counts: it batches words as the real one batches tokens, and draws itself as frames."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count
from typing import Any

BLOCK_SIZE = 16
ADMITTED, PREEMPTED, ENDED = 1, 2, 4


@dataclass(eq=False)
class FakeSequence:
    prompt: list[str]
    #: What each decoding step yields.
    pieces: list[Any]
    yielded: asyncio.Queue[Any]
    number: int = 0
    slot: int = -1
    computed: int = 0
    cached: int = 0
    written: int = 0
    is_gone: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + self.written

    @property
    def blocks(self) -> int:
        return -(-self.length // BLOCK_SIZE)

    def known(self) -> list[tuple[str, ...]]:
        return [tuple(self.prompt[:end]) for end in range(BLOCK_SIZE, len(self.prompt), BLOCK_SIZE)]


class FakeEngine:
    def __init__(self, num_slots: int = 8, num_blocks: int = 96, step_s: float = 0.02, budget: int = 48) -> None:
        self.num_slots, self.num_blocks, self.step_s, self.budget = num_slots, num_blocks, step_s, budget
        self.running: list[FakeSequence] = []
        self.waiting: deque[FakeSequence] = deque()
        self.cache: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._numbers = count(1)
        self._begin_s = time.monotonic()
        self._steps: list[tuple[float, int, int]] = []
        self._rows: dict[tuple[int, int], list[int]] = {}

    async def ask(self, prompts: list[str], pieces: list[Any]) -> AsyncIterator[tuple[int, Any]]:
        """Yield (index of the prompt, piece) for every piece of every prompt, as they are computed."""
        yielded: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        sequences = [
            FakeSequence(prompt.split() or ["?"], [(index, piece) for piece in pieces], yielded)
            for index, prompt in enumerate(prompts)
        ]
        self.waiting.extend(sequences)
        try:
            for _ in range(len(prompts) * len(pieces)):
                yield await yielded.get()
        finally:
            for seq in sequences:
                seq.is_gone = True

    async def run(self) -> None:
        while True:
            self._admit()
            prefilled, decoded = self._compute()
            if prefilled + decoded:
                duration_s = self.step_s * (1 + prefilled / self.budget)
                self._steps.append((duration_s, prefilled, decoded))
            await asyncio.sleep(self.step_s * (1 + prefilled / self.budget))

    @property
    def owned(self) -> int:
        return sum(seq.blocks for seq in self.running)

    def _admit(self) -> None:
        taken = {seq.slot for seq in self.running}
        free = [slot for slot in range(self.num_slots) if slot not in taken]
        while free and self.waiting and self.owned + self.waiting[0].blocks + len(self.running) <= self.num_blocks:
            seq = self.waiting.popleft()
            seq.slot, seq.number = free.pop(0), next(self._numbers)
            seq.cached = seq.computed = BLOCK_SIZE * sum(prefix in self.cache for prefix in seq.known())
            self.running.append(seq)
            self._row(seq)[7] |= ADMITTED

    def _compute(self) -> tuple[int, int]:
        prefilled = decoded = 0
        for seq in list(self.running):
            if seq not in self.running:
                continue
            if seq.is_gone:
                self._end(seq)
            elif seq.computed < seq.length - 1:
                tokens = min(self.budget - prefilled, seq.length - 1 - seq.computed)
                seq.computed += tokens
                prefilled += tokens
                self._row(seq, prefilled=tokens)
                self.cache.update(dict.fromkeys(prefix for prefix in seq.known() if len(prefix) <= seq.computed))
            else:
                self._decode(seq)
                decoded += 1
        return prefilled, decoded

    def _decode(self, seq: FakeSequence) -> None:
        seq.yielded.put_nowait(seq.pieces[seq.written])
        seq.written += 1
        seq.computed += 1
        self._row(seq, decoded=1)
        if seq.written == len(seq.pieces):
            self._end(seq)
        while self.owned > self.num_blocks:
            victim = self.running.pop()
            self._row(victim)[7] |= PREEMPTED
            victim.computed = 0
            self.waiting.appendleft(victim)

    def _end(self, seq: FakeSequence) -> None:
        self._row(seq)[7] |= ENDED
        self.running.remove(seq)

    def _row(self, seq: FakeSequence, prefilled: int = 0, decoded: int = 0) -> list[int]:
        row = self._rows.setdefault((seq.slot, seq.number), [0] * 8)
        row[:5] = [seq.number, len(seq.prompt), seq.cached, seq.computed, seq.written]
        row[5] += prefilled
        row[6] += decoded
        return row

    def picture(self) -> dict[str, Any]:
        """Return what happened since the last one, as the service sends it."""
        for seq in self.running:
            self._row(seq)
        steps, self._steps = self._steps, []
        rows, self._rows = self._rows, {}
        cached = min(self.num_blocks - self.owned, len(self.cache))
        return {
            "time_s": round(time.monotonic() - self._begin_s, 4),
            "num_slots": self.num_slots,
            "num_blocks": self.num_blocks,
            "block_size": BLOCK_SIZE,
            "device": "cpu",
            "steps": steps[-64:],
            "num_steps": len(steps),
            "lanes": [[slot, *row] for (slot, _), row in rows.items()],
            "queued": len(self.waiting),
            "blocks": {
                "owned": self.owned,
                "cached": cached,
                "limbo": 0,
                "free": self.num_blocks - self.owned - cached,
            },
            "output_tokens_per_s": sum(step[2] for step in steps) * 10.0,
            "prompt_tokens_per_s": sum(step[1] for step in steps) * 10.0,
        }
