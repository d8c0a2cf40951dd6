"""A step trace, read back: the steps on a time axis without idle time, and what became of each sequence."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from photon_grpc.errors import ConfigError

VERSION = 1
MAX_STEPS = 2000
#: What is longer than so many steps, in the middle, and idle is cut out.
_IDLE_STEPS = 8
#: Why an output ended that was computed to its end.
_WELL = frozenset(
    ("EOS", "STOP_TOKEN", "STOP_STRING", "MAX_TOKENS", "CONTEXT_LENGTH", "TIME_LIMIT", "CONSTRAINT_COMPLETE")
)


@dataclass(slots=True)
class TracedStep:
    number: int
    #: Since the trace began. Where steps overlap, a step begins where the one before it ends.
    start_s: float
    end_s: float
    prefill_tokens: int
    decode_tokens: int
    queued: int
    #: owned, cached, limbo, free.
    blocks: tuple[int, int, int, int]


@dataclass(slots=True)
class StepRun:
    """Steps of one kind that follow each other: a chunk of a prompt, or tokens of an output one by one."""

    is_decode: bool
    start_s: float
    end_s: float
    first_step: int
    last_step: int
    num_tokens: int


@dataclass(slots=True)
class SequenceLine:
    """One sequence."""

    name: str
    request_id: str = ""
    prompt_tokens: int = 0
    known_tokens: int = 0
    #: None: it had its seat before the first step that is shown.
    arrival_s: float | None = None
    parts: list[StepRun] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)
    #: Empty: it goes on.
    ended: str = ""

    @property
    def start_s(self) -> float:
        return self.parts[0].start_s if self.arrival_s is None else self.arrival_s

    @property
    def end_s(self) -> float:
        return self.parts[-1].end_s

    @property
    def is_well(self) -> bool:
        """Neither failed nor cancelled, as far as is known."""
        return not self.ended or self.ended in _WELL

    def tokens(self, *, decode: bool) -> int:
        return sum(part.num_tokens for part in self.parts if part.is_decode is decode)


@dataclass(slots=True)
class Trace:
    head: dict[str, Any]
    steps: list[TracedStep]
    lines: list[SequenceLine]
    #: Lines that could not be written, or cannot be read.
    num_missing: int
    #: (start, end) of idle times that are cut out.
    cuts: list[tuple[float, float]]


def read_trace(path: Path, wanted: tuple[int, int] | None) -> Trace:
    """`wanted`: first and last step of the last start in the file; None: its last ones. Raise ConfigError."""
    head: dict[str, Any] = {}
    read: deque[dict[str, Any]] = deque(maxlen=None if wanted else MAX_STEPS)
    num_missing = 0
    with path.open("rb") as file:
        for data in file:
            line = _parsed(data)
            if line.get("trace") == "photon-grpc":
                # Another start, or the same one in another file: this one begins with it.
                head, num_missing = line, 0
                read.clear()
            elif head and (number := line.get("step", line.get("after_step"))) is not None:
                num_missing += line.get("dropped", 0)
                if wanted is None or wanted[0] <= number <= wanted[1]:
                    read.append(line)
            else:
                num_missing += 1
    if not head or head.get("version") != VERSION:
        raise ConfigError(f"{path} is not a step trace of version {VERSION}: `serve --step-trace FILE` writes one")
    if not any("step" in line for line in read):
        raise ConfigError(f"{path} has no steps of its last start{' from' if wanted else ''}{_words(wanted)}")
    return _arranged(head, read, num_missing)


def _words(wanted: tuple[int, int] | None) -> str:
    return "" if wanted is None else f" {wanted[0]} to {wanted[1]}"


def _parsed(data: bytes) -> dict[str, Any]:
    """Nothing of a line that was cut, or written by something else."""
    try:
        line = json.loads(data)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def _arranged(head: dict[str, Any], read: Iterable[dict[str, Any]], num_missing: int) -> Trace:
    steps: list[TracedStep] = []
    lines: dict[str, SequenceLine] = {}
    for told in read:
        if "step" in told:
            steps.append(_step(told, steps[-1].end_s if steps else 0.0))
            _add(lines, told, steps[-1])
        for name in told["preempted"]:
            if name in lines:
                lines[name].preempted_s.append(steps[-1].end_s)
        for name, why in told["ended"]:
            if name in lines:
                lines[name].ended = why
    shown = sorted((line for line in lines.values() if line.parts), key=lambda line: line.start_s)
    return Trace(head, steps, shown, num_missing, _cuts(steps))


def _add(lines: dict[str, SequenceLine], told: dict[str, Any], step: TracedStep) -> None:
    """The rows of a step."""
    for each in told["seated"]:
        _seat(lines, each, told["start_s"])
    for is_decode, rows in ((False, told["prefill"]), (True, told["decode"])):
        for name, _, num_tokens in rows:
            _extend(lines.setdefault(name, SequenceLine(name)), step, is_decode, num_tokens)


def _step(told: dict[str, Any], before_s: float) -> TracedStep:
    start_s = max(told["start_s"], before_s)
    blocks = told["blocks"]
    return TracedStep(
        told["step"],
        start_s,
        max(told["start_s"] + told["duration_s"], start_s),
        told["prefill_tokens"],
        told["decode_tokens"],
        told["queued"],
        (blocks["owned"], blocks["cached"], blocks["limbo"], blocks["free"]),
    )


def _seat(lines: dict[str, SequenceLine], each: dict[str, Any], start_s: float) -> None:
    line = lines.setdefault(each["sequence"], SequenceLine(each["sequence"]))
    if not line.request_id:
        line.request_id = each["request_id"] + (f" #{each['output']}" if each["output"] else "")
        line.prompt_tokens, line.known_tokens = each["prompt_tokens"], each["known_tokens"]
        line.arrival_s = max(start_s - each["queue_s"], 0.0)


def _extend(line: SequenceLine, step: TracedStep, is_decode: bool, num_tokens: int) -> None:
    last = line.parts[-1] if line.parts else None
    if last is not None and is_decode and last.is_decode and last.last_step == step.number - 1:
        last.end_s, last.last_step = step.end_s, step.number
        last.num_tokens += num_tokens
    else:
        line.parts.append(StepRun(is_decode, step.start_s, step.end_s, step.number, step.number, num_tokens))


def _cuts(steps: list[TracedStep]) -> list[tuple[float, float]]:
    """Idle times that are much longer than a step."""
    longest_s = _IDLE_STEPS * max(median(step.end_s - step.start_s for step in steps), 1e-3)
    gaps = ((before.end_s, after.start_s) for before, after in pairwise(steps))
    return [(start_s, end_s) for start_s, end_s in gaps if end_s - start_s > longest_s]
