"""What differs from the solitary run, where it began, and what the outputs that differ have in common."""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.bits.company import Computed, Outcome, StepSize
from benchmarks.bits.requests import Drawn, request_of
from photon_grpc.core.logprobs import RECORD, LogprobParams

#: (number of the request, number of its output) -> what came when the request was alone.
Reference = Mapping[tuple[int, int], Outcome]
#: Most differences that a scenario keeps.
_KEPT = 20
_BOUNDS = (1, 2, 5, 9, 17, 33, 65, 129, 257)


class Difference(NamedTuple):
    #: "id", "logprob" (the ids are equal up to there), "prompt logprob", "length" or "failure".
    kind: str
    #: Of the first token that differs, in the output or, for "prompt logprob", in the prompt.
    position: int
    #: Of the first record that differs, where its id is the same.
    delta: float


def first_difference(found: Outcome, expected: Outcome, logprobs: LogprobParams) -> Difference | None:
    """Compare bit for bit; a continuation with the end of the output."""
    behind, size = found.num_continued, logprobs.num_records * RECORD.size
    ids, records = expected.ids[behind:], expected.records[behind * size :]
    if found.finish != expected.finish and ": " in found.finish:
        return Difference("failure", behind, 0.0)
    at_prompt = _first(found.prompt_records, expected.prompt_records)
    if at_prompt is not None:
        at = at_prompt // (max(logprobs.num_prompt_records, 1) * RECORD.size)
        return Difference("prompt logprob", at + 1, _delta(found.prompt_records, expected.prompt_records, at_prompt))
    at_id = next((at for at, (one, other) in enumerate(zip(found.ids, ids, strict=False)) if one != other), None)
    at_byte = _first(found.records, records)
    at_record = None if at_byte is None else at_byte // size
    if at_record is not None and (at_id is None or at_record < at_id):
        return Difference("logprob", behind + at_record, _delta(found.records, records, at_byte or 0))
    if at_id is not None:
        return Difference("id", behind + at_id, 0.0)
    if len(found.ids) != len(ids) or found.finish != expected.finish:
        return Difference("length", behind + min(len(found.ids), len(ids)), 0.0)
    return None


def _first(one: bytes, other: bytes) -> int | None:
    if one == other:
        return None
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _delta(found: bytes, expected: bytes, at_byte: int) -> float:
    """Return by how much the logprob of the record there differs; 0 where it is of another id or missing."""
    begin = at_byte // RECORD.size * RECORD.size
    try:
        (id_a, logprob_a, _), (id_b, logprob_b, _) = (
            RECORD.unpack_from(found, begin),
            RECORD.unpack_from(expected, begin),
        )
    except struct.error:
        return 0.0
    return abs(logprob_a - logprob_b) if id_a == id_b else 0.0


def digest(outcome: Outcome) -> str:
    """Of ids, the bits of all logprobs, and the reason of the end."""
    ids = struct.pack(f"<{len(outcome.ids)}i", *outcome.ids)
    parts = (ids, outcome.records, outcome.prompt_records, outcome.finish.encode())
    return hashlib.sha256(b"|".join(parts)).hexdigest()


@dataclass
class Tally:
    """Of one scenario."""

    instance: str
    scenario: str
    equal: int = 0
    differ: int = 0
    #: Of those that differ, those whose ids do.
    other_ids: int = 0
    seconds: float = 0.0
    steps: int = 0
    most_rows: int = 0
    preempted: int = 0
    cached: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    positions: list[int] = field(default_factory=list)
    largest: float = 0.0
    kept: list[dict[str, Any]] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return self.equal + self.differ


class Report:
    """Counts equal and different outputs by scenario, by what was drawn, and by how they were computed."""

    def __init__(self, drawn: Sequence[Drawn], reference: Reference) -> None:
        self._drawn = drawn
        self._reference = reference
        self.tallies: list[Tally] = []
        #: Trait -> [outputs, those that differ].
        self.traits: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        #: The kind of step that computed the first differing token -> how many.
        self.steps: Counter[str] = Counter()

    @property
    def num_compared(self) -> int:
        return sum(tally.compared for tally in self.tallies)

    @property
    def num_different(self) -> int:
        return sum(tally.differ for tally in self.tallies)

    def add(self, tally: Tally, outcomes: Iterable[Outcome], sizes: Sequence[StepSize]) -> None:
        tally.steps += len(sizes)
        tally.most_rows = max(tally.most_rows, *(size.rows for size in sizes), 0)
        for outcome in outcomes:
            expected = self._reference.get((outcome.index, outcome.output))
            if expected is not None:
                self._add(tally, outcome, expected, sizes)
        if all(tally is not each for each in self.tallies):
            self.tallies.append(tally)

    def tally(self, instance: str, scenario: str) -> Tally:
        """Return the tally of a scenario, which may have run before."""
        found = (each for each in self.tallies if (each.instance, each.scenario) == (instance, scenario))
        return next(found, Tally(instance, scenario))

    def _add(self, tally: Tally, outcome: Outcome, expected: Outcome, sizes: Sequence[StepSize]) -> None:
        drawn = self._drawn[outcome.index]
        difference = first_difference(outcome, expected, request_of(drawn, "").logprobs)
        tally.preempted += outcome.num_preempted > 0
        tally.cached += outcome.num_cached > 0
        traits = (*drawn.traits, *path_traits(outcome, len(drawn.prompt), sizes))
        # Without logprobs most differences remain unseen.
        for trait in traits if "logprobs" in drawn.options else traits[:3]:
            self.traits[trait][0] += 1
            self.traits[trait][1] += difference is not None
        if difference is None:
            tally.equal += 1
        else:
            tally.other_ids += outcome.ids != expected.ids[outcome.num_continued :]
            self._different(tally, outcome, drawn, difference, sizes)

    def _different(
        self, tally: Tally, outcome: Outcome, drawn: Drawn, difference: Difference, sizes: Sequence[StepSize]
    ) -> None:
        tally.differ += 1
        tally.kinds[difference.kind] += 1
        tally.positions.append(difference.position)
        tally.largest = max(tally.largest, difference.delta)
        behind = 0 if difference.kind == "prompt logprob" else len(drawn.prompt)
        where = step_of(outcome, behind + difference.position - 1, len(drawn.prompt) + outcome.num_continued, sizes)
        self.steps[where] += 1
        if len(tally.kept) < _KEPT:
            tally.kept.append(
                {
                    "request": outcome.index,
                    "output": outcome.output,
                    **difference._asdict(),
                    "step": where,
                    "cached": outcome.num_cached,
                    "preempted": outcome.num_preempted,
                    "continued": outcome.num_continued,
                    "prompt": len(drawn.prompt),
                    "finish": outcome.finish,
                    "options": [name for name in drawn.options if name not in ("max_tokens", "seed", "ignore_eos")],
                    "parts": _parts(outcome.steps, sizes),
                }
            )

    # -- tables --------------------------------------------------------------------------------------------------------

    def scenario_table(self) -> str:
        lines = [
            "| instance | scenario | outputs | equal | differ | in ids | first at (median) | kinds | largest Δ logprob "
            "| rows at most | preempted | cached | steps | s |",
            "|---|---|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|",
        ]
        return "\n".join([*lines, *(_scenario_row(tally) for tally in self.tallies)])

    def trait_table(self) -> str:
        """Return the traits of outputs with logprobs, those first that differ most often."""
        rows = sorted(self.traits.items(), key=lambda item: (-item[1][1] / item[1][0], item[0]))
        lines = [f"| {name} | {total} | {differ} | {differ / total:.1%} |" for name, (total, differ) in rows]
        return "\n".join(["| outputs with | compared | differ | share |", "|---|--:|--:|--:|", *lines])

    def step_table(self) -> str:
        lines = [f"| {name} | {count} |" for name, count in self.steps.most_common()]
        return "\n".join(["| the first differing token came of | outputs |", "|---|--:|", *lines])


def _scenario_row(tally: Tally) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in tally.kinds.most_common()) or "–"
    first = f"{statistics.median(tally.positions):.0f}" if tally.positions else "–"
    return (
        f"| {tally.instance} | {tally.scenario} | {tally.compared} | {tally.equal} | {tally.differ} "
        f"| {tally.other_ids} | {first} | {kinds} | {tally.largest:.1e} | {tally.most_rows} | {tally.preempted} "
        f"| {tally.cached} | {tally.steps} | {tally.seconds:.1f} |"
    )


def path_traits(outcome: Outcome, num_prompt: int, sizes: Sequence[StepSize]) -> list[str]:
    """Return how an output was computed."""
    given = num_prompt + outcome.num_continued
    names = [f"rows at most {_bucket(max((sizes[part.step].rows for part in outcome.steps), default=1))}"]
    parts = [part for part in outcome.steps if part.first + part.count <= given and part.first < given]
    names += ["prompt in several steps"] if len(parts) > 1 else []
    names += ["prompt beside other rows"] if any(sizes[part.step].rows > 1 for part in parts) else []
    names += ["decoded beside a prompt"] if any(_is_beside(part, sizes) for part in outcome.steps) else []
    names += ["prefix from the cache or from a sibling"] if outcome.num_cached else []
    names += ["preempted"] if outcome.num_preempted else []
    return names + (["continued"] if outcome.num_continued else [])


def _is_beside(part: Computed, sizes: Sequence[StepSize]) -> bool:
    return part.count == 1 and sizes[part.step].chunks > 0


def step_of(outcome: Outcome, position: int, num_given: int, sizes: Sequence[StepSize]) -> str:
    """Return what kind of step computed a position last."""
    parts = [part for part in outcome.steps if part.first <= position < part.first + part.count]
    if not parts:
        return "no step here (cached or copied)"
    part, size = parts[-1], sizes[parts[-1].step]
    of_output = "a decode row" if part.count == 1 else f"a row of {_bucket(part.count)} with its drafts"
    kind = of_output if part.first >= num_given else f"a prompt part of {_bucket(part.count)}"
    again = ", computed again" if len(parts) > 1 else ""
    beside = ", beside prompts" if _is_beside(part, sizes) else ""
    plain = ", plain" if size.is_plain else ""
    return f"{kind}, {_bucket(size.rows)} rows{beside}{again}{plain}"


def _parts(steps: Sequence[Computed], sizes: Sequence[StepSize]) -> str:
    """Return FIRST+COUNT@ROWS/TOKENS of the first and last steps."""
    texts = [f"{part.first}+{part.count}@{sizes[part.step].rows}/{sizes[part.step].tokens}" for part in steps]
    return " ".join(texts if len(texts) <= 24 else [*texts[:12], "…", *texts[-12:]])


def _bucket(count: int) -> str:
    low = max(bound for bound in _BOUNDS if bound <= max(count, 1))
    above = _BOUNDS[_BOUNDS.index(low) + 1 :]
    high = above[0] - 1 if above else None
    return f"{low}+" if high is None else f"{low}" if high == low else f"{low}-{high}"
