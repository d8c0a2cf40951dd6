"""The same requests through `LLM` and through gRPC, many callers at a time, against the solitary run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from benchmarks.bits.company import Outcome
from benchmarks.bits.requests import Drawn
from benchmarks.service import serving
from photon_grpc import LLM
from photon_grpc.client import SyncClient
from photon_grpc.core.generation import TokenScore
from photon_grpc.core.logprobs import RECORD

_CALLERS = 64


class Asked(NamedTuple):
    """A request, by its number, and the part of its output that is given."""

    number: int
    drawn: Drawn
    continued: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        if not self.continued:
            return dict(self.drawn.options)
        return dict(self.drawn.options) | {"continue_from": list(self.continued), "num_outputs": 1}


#: Sends a request; returns its outputs.
Send = Callable[[Asked], list[Outcome]]


def sample(
    drawn: Sequence[Drawn], outputs: dict[int, list[int]], count: int, rng: random.Random, share: float = 0.25
) -> list[Asked]:
    """Return some of the requests; a share of them continues at a random id of the first output."""
    asked = []
    for number in rng.sample(sorted(outputs), min(count, len(outputs))):
        ids = outputs[number]
        at = rng.randrange(1, len(ids)) if len(ids) > 1 and rng.random() < share else 0
        asked.append(Asked(number, drawn[number], tuple(ids[:at])))
    return asked


def all_at_once(send: Send, asked: Sequence[Asked]) -> tuple[list[Outcome], float]:
    """Return the outputs of all of them, and the seconds they took."""
    begin_s = time.monotonic()
    with ThreadPoolExecutor(_CALLERS) as callers:
        outcomes = [outcome for some in callers.map(send, asked) for outcome in some]
    return outcomes, time.monotonic() - begin_s


@contextmanager
def through_llm(flags: Sequence[str]) -> Iterator[Send]:
    values = {name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    with LLM(values.pop("model", ""), **{name: _number(value) for name, value in values.items()}) as llm:
        yield partial(_complete, llm)


@contextmanager
def through_grpc(flags: Sequence[str]) -> Iterator[Send]:
    with serving(*flags) as target, SyncClient(target) as client:
        yield partial(_call, client)


def _number(value: str) -> int | str:
    return int(value) if value.isdigit() else value


def _complete(llm: LLM, asked: Asked) -> list[Outcome]:
    return [
        _outcome(asked, each.output_index, each.token_ids, each.finish_reason.name, (each.scores, each.prompt_scores))
        for each in llm.generate([list(asked.drawn.prompt)], **asked.options)
    ]


def _call(client: SyncClient, asked: Asked) -> list[Outcome]:
    generation = client.generate(list(asked.drawn.prompt), token_ids=True, timeout=300.0, **asked.options)
    return [
        _outcome(asked, index, each.token_ids, each.finish.reason, (each.scores, generation.prompt_scores))
        for index, each in enumerate(generation.outputs)
    ]


def _outcome(
    asked: Asked, index: int, ids: Sequence[int], finish: str, scores: tuple[Sequence[TokenScore], Sequence[TokenScore]]
) -> Outcome:
    output, prompt = scores
    return Outcome(
        asked.number, index, len(asked.continued), list(ids), _packed(output), _packed(prompt[1:]), finish=finish
    )


def as_computed(outcome: Outcome, own: Outcome, first: Outcome) -> bytes:
    """Return the prompt's records as the engine would give them, if a interface gave what it should; else others.

    A interface gives those of the first output with every output, and none to those who continue. The engine gives them
    with the first output only.

    Args:
        outcome: what came through the interface.
        own: the same output of the solitary run.
        first: the first output of the same request there.
    """
    found, expected = outcome.prompt_records, b"" if outcome.num_continued else first.prompt_records
    if found == expected:
        return own.prompt_records
    return expected if found == own.prompt_records else found


def _packed(scores: Sequence[TokenScore]) -> bytes:
    """Return scores as the engine packs them; float32 survives the way through Python's numbers."""
    records = [each for score in scores for each in (score, *score.candidates)]
    return b"".join(RECORD.pack(each.token_id, each.logprob or 0.0, each.rank) for each in records)
