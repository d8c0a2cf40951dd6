"""Log-probabilities that tests can predict, for every id after given ids, with many equal logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import exp, log

from photon_grpc.core.logprobs import RECORD, LogprobParams

VOCAB = 97


@cache
def _scores(state: int) -> tuple[tuple[float, int], ...]:
    """(logprob, rank) of every id."""
    logits = [(state + 7919 * token * token) % 61 / 8 for token in range(VOCAB)]
    total = log(sum(exp(logit) for logit in logits))
    return tuple((logit - total, 1 + sum(other > logit for other in logits)) for logit in logits)


def position(before: Sequence[int], token: int, num_best: int, given: tuple[int, ...] = ()) -> bytes:
    """Return the records of `token` after the ids `before`."""
    state = 11
    for each in before:
        state = (state * 31 + each) % 211
    scores = _scores(state)
    best = sorted(range(VOCAB), key=lambda each: (scores[each][1], each))[:num_best]
    return b"".join(RECORD.pack(each, *scores[each]) for each in (token, *best, *given))


def of_prompt(prompt: Sequence[int], params: LogprobParams, first: int = 1, last: int | None = None) -> bytes:
    """Return the records of the prompt positions first ... last."""
    end = len(prompt) if last is None else last + 1
    return b"".join(position(prompt[:at], prompt[at], params.num_prompt_logprobs) for at in range(first, end))


def of_output(prompt: Sequence[int], ids: Sequence[int], params: LogprobParams) -> bytes:
    """Return the records of `ids`, sampled after `prompt`; b"" if none are wanted."""
    if not params.num_records:
        return b""
    best = max(params.num_logprobs, 0)
    return b"".join(position([*prompt, *ids[:at]], ids[at], best, params.token_ids) for at in range(len(ids)))
