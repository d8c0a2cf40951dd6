"""Drafters that know the answers, or do their worst; and stories whose outputs they may not change."""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file

from benchmarks.bits.company import Company, Outcome, Scenario
from benchmarks.bits.requests import Drawn, Limits, draw_requests
from benchmarks.engine import config_of
from photon_grpc import demo
from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.batch import Batch
from photon_grpc.core.logprobs import RECORD
from photon_grpc.runner.drafting import NoDrafter
from photon_grpc.runner.model_runner import ModelRunner
from tests.runner.heads import random_head

VOCAB_SIZE = 4096
MAX_MODEL_LEN = 200
LIMITS = Limits(VOCAB_SIZE, MAX_MODEL_LEN, has_grammars=False, min_output=1, max_output=16, usual_prompt=24)
CONSTRAINTS = (
    ConstraintAsk("regex", "[a-z ]{2,30}"),
    ConstraintAsk("regex", "(yes|no|maybe)\\."),
    ConstraintAsk("choices", choices=("red", "green", "reddish")),
    ConstraintAsk("json_object"),
    ConstraintAsk(
        "json_schema",
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer"}}, '
        '"required": ["name", "n"], "additionalProperties": false}',
    ),
    ConstraintAsk("grammar", 'start: "a" b\nb: "(" b ")" | "x"'),
)
#: Request and output -> the ids that it has without drafts.
Truth = Mapping[tuple[int, int], list[int]]
#: Drafters of the product: prompt lookup, a draft model, one whose logits are NaN, an EAGLE-3 head, constraints alone.
OWN = ("ngram", "model", "nan", "eagle3", "grammar")
#: Kinds of drafters; a number is the share of right drafts. All of them also have what a constraint leaves no choice
#: about.
KINDS: tuple[float | str, ...] = (0.0, 0.3, 0.7, 0.95, 1.0, "end", "constant", *OWN)


class ScriptedDrafter(NoDrafter):
    """Of an engine on a CPU: knows the answers, and drafts them rightly or wrongly.

    Args:
        answers: seed and output -> prompt and output.
        kind: see KINDS.
    """

    max_drafts = 7

    def __init__(
        self, runner: ModelRunner, answers: Mapping[tuple[int, int], list[int]], kind: float | str, seed: int
    ) -> None:
        self._table = runner.table
        self._answers = answers
        self._kind = kind
        self._rng = random.Random(seed)
        self.num_drafts = self.num_right = 0
        runner.drafter = self

    def draft(self, batch: Batch) -> None:
        table = self._table
        for slot, yields in zip(batch.slots, batch.yields, strict=True):
            if yields < 2:
                continue
            known = int(table.numbers.num_known[slot])
            key = int(table.numbers.seed[slot]) & (2**64 - 1), int(table.numbers.output_index[slot])
            answer = self._answers.get(key, [])[known : known + yields - 1]
            drafts = [self._one(answer[at] if at < len(answer) else None) for at in range(yields - 1)]
            table.token_ids[slot, known : known + len(drafts)] = table.to_device(drafts, table.token_ids.dtype)
            self.num_drafts += len(drafts)
            self.num_right += sum(one == other for one, other in zip(drafts, answer, strict=False))

    def _one(self, right: int | None) -> int:
        if self._kind == "end":
            return 1
        if self._kind == "constant":
            return 335
        if right is not None and self._rng.random() < float(self._kind):
            return right
        return self._rng.choice((0, VOCAB_SIZE - 1, self._rng.randrange(VOCAB_SIZE)))


class Story(NamedTuple):
    seed: int
    scenario: Scenario
    kind: float | str
    num_drafts: int
    depth: int
    num_requests: int = 4
    #: Whether the embedded draft model is served, for which its own first layer drafts: a step costs a third.
    may_be_small: bool = False

    @property
    def is_small(self) -> bool:
        # A head takes the states of three layers, which the draft model does not have.
        return self.may_be_small and self.kind != "eagle3"


@cache
def loaded(
    depth: int, num_drafts: int, contiguous: bool = False, drafter: str = "", is_small: bool = False
) -> Assembled:
    """Return an embedded model; with drafts a step of it drafts that many, by prompt lookup or a draft model.

    Without the name of a `drafter` any may take its place.
    """
    flags = ["--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16", "--block-size", "8"]
    flags += ["--num-blocks", "800", "--async-depth", str(depth)]
    flags += ["--model", str(demo.DRAFT)] if is_small else []
    flags += ["--kv-layout", "contiguous"] if contiguous else []
    if num_drafts:
        smaller = first_layer_dir() if is_small else str(demo.DRAFT)
        model = {"model": smaller, "nan": smaller, "eagle3": head_dir(), "grammar": "grammar"}
        flags += ["--speculative-model", model.get(drafter, "ngram"), "--speculation-control", "fixed"]
        flags += ["--num-speculative-tokens", str(num_drafts)]
    assembled = assemble(config_of(flags), lambda *_: None)
    if drafter == "nan":
        assembled.runner.drafter._drafter._sampler._head.norm.weight.fill_(math.nan)  # type: ignore[attr-defined]
    return assembled


@cache
def head_dir() -> str:
    """Write a head with random weights, once; it is seldom right."""
    directory = tempfile.TemporaryDirectory()
    _KEPT.append(directory)
    random_head(Path(directory.name))
    return directory.name


@cache
def first_layer_dir() -> str:
    """Write the embedded draft model without its other layers, once."""
    directory = tempfile.TemporaryDirectory()
    _KEPT.append(directory)
    path = Path(directory.name)
    shutil.copytree(demo.DRAFT, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    kept = {name: each for name, each in weights.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return directory.name


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def requests(count: int, seed: int) -> list[Drawn]:
    """Return requests of all kinds; a fourth have a constraint, and a fourth may end by EOS."""
    rng = random.Random(f"requests {seed}")
    many = []
    for drawn in draw_requests(count, LIMITS, seed):
        options = dict(drawn.options)
        if rng.random() < 0.25:
            options |= {"constraint": rng.choice(CONSTRAINTS)}
            for name in ("allowed_token_ids", "min_tokens", "logit_bias", "stop_token_ids"):
                options.pop(name, None)
        if rng.random() < 0.25:
            options["stop_token_ids"] = [1, *rng.sample(range(VOCAB_SIZE), 500)]
        many.append(Drawn(drawn.prompt, options))
    return many


def outcomes(
    assembled: Assembled, scenario: Scenario, asked: list[tuple[int, Drawn, tuple[int, ...]]], seed: int
) -> list[Outcome]:
    company = Company(assembled, scenario, MAX_MODEL_LEN, seed)
    found: list[Outcome] = []
    try:
        for _ in range(scenario.passes):
            found += company.run(asked, stop_s=float("inf"))
    finally:
        company.close()
    return found


def alone(many: list[Drawn], is_small: bool) -> dict[tuple[int, int], Outcome]:
    """Return the outcomes without drafts, one request at a time."""
    asked: list[tuple[int, Drawn, tuple[int, ...]]] = [(number, one, ()) for number, one in enumerate(many)]
    found = outcomes(loaded(0, 0, is_small=is_small), Scenario("alone", company=1), asked, 0)
    return {(outcome.index, outcome.output): outcome for outcome in found}


@lru_cache(maxsize=128)
def asked_alone(count: int, seed: int, is_small: bool) -> tuple[list[Drawn], dict[tuple[int, int], Outcome]]:
    """Return requests, and their outcomes alone."""
    many = requests(count, seed)
    return many, alone(many, is_small)


def play(story: Story, asking: int | None = None) -> tuple[int, int, int]:
    """Assert that a story has the outputs of its requests alone; return outputs, drafts and right drafts.

    Args:
        asking: the seed of the requests, by default the story's.
    """
    many, expected = asked_alone(story.num_requests, story.seed if asking is None else asking, story.is_small)
    answers = {
        (many[number].options["seed"], output): [*many[number].prompt, *outcome.ids]
        for (number, output), outcome in expected.items()
    }
    own = story.kind if story.kind in OWN else ""
    assembled = loaded(story.depth, story.num_drafts, story.scenario.contiguous, str(own), story.is_small)
    assert isinstance(assembled.runner, ModelRunner)
    drafter = None if own else ScriptedDrafter(assembled.runner, answers, story.kind, story.seed)
    rng = random.Random(story.seed)
    asked: list[tuple[int, Drawn, tuple[int, ...]]] = []
    for number, one in enumerate(many):
        ids = expected[number, 0].ids
        for _ in range(max(story.scenario.continuations, 1)):
            cut = rng.randrange(len(ids)) if story.scenario.continuations and ids else 0
            asked.append((number, one, tuple(ids[:cut])))
    found = outcomes(assembled, story.scenario, asked, story.seed)
    for outcome in found:
        check(outcome, expected[outcome.index, outcome.output], many[outcome.index])
    return (len(found), drafter.num_drafts, drafter.num_right) if drafter else (len(found), 0, 0)


def check(found: Outcome, expected: Outcome, drawn: Drawn) -> None:
    cut = found.num_continued
    assert found.ids == expected.ids[cut:], (drawn, cut)
    assert found.finish == expected.finish, drawn
    size = len(expected.records) // max(len(expected.ids), 1)
    assert_close(found.records, expected.records[cut * size :])
    if ": " not in expected.finish:
        # One that fails has sent the parts of its prompt that were computed before, in as many steps as it had.
        assert_close(found.prompt_records, expected.prompt_records)


def assert_close(found: bytes, expected: bytes) -> None:
    """Compare log-probabilities; ids of candidates may change places where they are as good as equal."""
    assert len(found) == len(expected)
    for (_, one, _), (_, other, _) in zip(RECORD.iter_unpack(found), RECORD.iter_unpack(expected), strict=True):
        # Without drafts another company of rows moves them by up to 2e-5 of their size, too.
        assert one == other or abs(one - other) < 5e-5 * max(1.0, abs(other)), (one, other)
