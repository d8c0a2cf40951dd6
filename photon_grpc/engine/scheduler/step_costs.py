"""Costs of steps with drafts beside those of steps without: measured by the wall time of whole steps, or assumed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from photon_grpc.core.batch import MAX_VERIFY_TOKENS, Batch

#: Rows of the shapes that runners have for steps with drafts; a step of others is padded to the next.
SHAPE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
#: The tokens whose arithmetic is assumed to take as long as reading the weights once; a step takes the time of both.
_BALANCE = 200
#: The least weight of a new duration, and of one of a probe, which are rare.
_NEW, _NEW_OF_PROBE = 0.2, 0.5
#: A duration counts as at most so many times what is known.
_LONGEST = 1.5
#: The first of a kind with drafts counts as at most so many plain steps.
_LONGEST_FIRST = 4.0
#: A step counts if the one before it and the one behind it are of its kind.
_ALIKE = 3


class DraftCost(NamedTuple):
    """The cost of making drafts that is assumed until it is measured.

    step_s: seconds of each step that drafts. draft_s, draft_share: seconds of each draft, and its share of a step.
    """

    step_s: float = 0.0
    draft_s: float = 0.0
    draft_share: float = 0.0


class Kind(NamedTuple):
    """The kind of a step: the rows of its shape, its drafts of a row."""

    rows: int
    drafts: int


class StepCosts:
    """Seconds of steps by kind.

    A step takes the time from when the step before it was read until it is read, whatever that is spent on: the device,
    launching drafts, accepting them, or waiting because the host had nothing launched.

    Args:
        step_bytes: tokens of a step -> bytes of weights that it reads.
        making: what making drafts is assumed to cost.
        clock: seconds.
    """

    def __init__(
        self, step_bytes: Callable[[int], float], making: DraftCost, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._step_bytes = step_bytes
        self._making = making
        self._clock = clock
        #: Kind -> seconds, and the durations that these are made of.
        self._seconds: dict[Kind, float] = {}
        self._counts: dict[Kind, int] = {}
        #: Seconds of making drafts, over 1 + drafts: what steps took beyond their tokens. None: never measured.
        self._making_s: float | None = None
        self._last_s = 0.0
        self._last: tuple[Kind, float] | None = None
        self._num_alike = 0

    def stepped(self, batch: Batch, kind: Kind | None) -> float:
        """Learn that a step was read just now; return the seconds that it took, 0 where there was none before it.

        kind: None for steps with prompts and failed ones, which teach nothing.
        """
        now_s = self._clock()
        took_s, self._last_s = now_s - self._last_s if self._last_s else 0.0, now_s
        if kind is None:
            self._last, self._num_alike = None, 0
            return 0.0
        before, self._last = self._last, (kind, took_s)
        if before is None or before[0] != kind:
            self._num_alike = 1
            return took_s if before else 0.0
        self._num_alike += 1
        if self._num_alike >= _ALIKE:
            self.learn(kind, before[1])
        return took_s

    def learn_probe(self, kind: Kind, seconds: float) -> None:
        """Learn how long each step of a probe took."""
        self.learn(kind, seconds, _NEW_OF_PROBE)

    def learn(self, kind: Kind, seconds: float, least_weight: float = _NEW) -> None:
        """Learn how long a step of a kind took."""
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        # A first step that a pause of the machine made long must not rule its kind out: it is bounded by plain ones.
        first_s = min(seconds, _LONGEST_FIRST * self.near_plain_s(kind.rows) or seconds) if kind.drafts else seconds
        known_s = self._seconds.get(kind, first_s)
        new_s = min(seconds, _LONGEST * known_s)
        self._seconds[kind] = known_s + max(least_weight, 1.0 / count) * (new_s - known_s)
        if kind.drafts and (plain_s := self.plain_s(kind.rows)):
            self._making_s = (self._seconds[kind] - plain_s * self._of_tokens(kind)) / (1 + kind.drafts)

    def plain_s(self, rows: int) -> float:
        """Return the seconds of a step without drafts; 0: never measured."""
        return self._seconds.get(Kind(rows, 0), 0.0)

    @property
    def has_drafted(self) -> bool:
        """Whether a step with drafts was measured."""
        return self._making_s is not None

    def is_measured(self, kind: Kind) -> bool:
        return kind in self._seconds

    def near_plain_s(self, rows: int) -> float:
        """Return the seconds of a step without drafts, by those of as many rows, else of the next measured number."""
        measured = [kind.rows for kind in self._seconds if not kind.drafts]
        if not measured or Kind(rows, 0) in self._seconds:
            return self.plain_s(rows)
        near = min(measured, key=lambda each: abs(each - rows))
        return self.plain_s(near) * (_BALANCE + rows) / (_BALANCE + near)

    def ratio(self, kind: Kind) -> float:
        """Return the seconds of a step over those of one without drafts: measured, or assumed."""
        plain_s, of_tokens = self.near_plain_s(kind.rows), self._of_tokens(kind)
        if kind in self._seconds:
            # One measured as next to nothing is old: the machine was less busy then.
            return max(self._seconds[kind] / plain_s, (1.0 + of_tokens) / 2)
        making_s, drafts = self._making_s, kind.drafts
        if making_s is None:
            making = self._making
            return of_tokens + (making.step_s + drafts * making.draft_s) / plain_s + drafts * making.draft_share
        return of_tokens + max(making_s, 0.0) * (1 + drafts) / plain_s

    def _of_tokens(self, kind: Kind) -> float:
        """Return what a step's tokens are assumed to cost, over those of one without drafts."""
        tokens = kind.rows * (1 + kind.drafts)
        read = self._step_bytes(tokens) / self._step_bytes(kind.rows)
        return (read * _BALANCE + tokens) / (_BALANCE + kind.rows)


def rows_of_shape(num_rows: int) -> int:
    """Return the rows that a step of `num_rows` is padded to if it drafts."""
    at = bisect_left(SHAPE_ROWS, num_rows)
    return SHAPE_ROWS[at] if at < len(SHAPE_ROWS) else num_rows


def counts_with_shape(num_rows: int, counts: Iterable[int]) -> list[int]:
    """Return those of the numbers of drafts that runners have a shape for beside so many rows.

    Longer steps have no CUDA graph: launching them takes longer than their drafts can gain.
    """
    rows = rows_of_shape(num_rows)
    return [k for k in counts if rows * (1 + k) <= MAX_VERIFY_TOKENS]
