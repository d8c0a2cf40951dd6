"""Rows that ask for log-probabilities, and batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams
from photon_grpc.core.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
#: Rows of slots 1, 2, …: every sampling level, with and without log-probabilities.
ROWS: tuple[tuple[SamplingParams, LogprobParams], ...] = (
    (GREEDY, LogprobParams(num_logprobs=5)),
    (SamplingParams(0.9, seed=3), NO_LOGPROBS),
    (SamplingParams(1.2, top_k=50, top_p=0.9, seed=4), LogprobParams(num_logprobs=20, token_ids=(7, 319, 0))),
    (SamplingParams(1.3, seed=5), LogprobParams(num_logprobs=0)),
    (GREEDY, LogprobParams(token_ids=(11, 12))),
    (GREEDY, NO_LOGPROBS),
)
#: A prompt.
LONG = [(7 + 13 * at) % 320 for at in range(60)]


def admission(
    slot: int, ids: Sequence[int], sampling: SamplingParams, scores: LogprobParams, **more: object
) -> Admission:
    blocks = tuple(range(10 * slot, 10 * slot + 10))
    return Admission(slot, tuple(ids), len(ids), 0, (blocks,), sampling, logprobs=scores, **more)  # type: ignore[arg-type]


def prompt_of(slot: int) -> list[int]:
    return [(17 * slot + 5 * at) % 320 for at in range(2 + slot)]


def batches(rows: tuple[tuple[SamplingParams, LogprobParams], ...], num_steps: int = 3) -> Iterator[Batch]:
    """Return all prompts in one step, then decode steps."""
    slots = tuple(range(1, len(rows) + 1))
    ones, counts = (1,) * len(rows), tuple(len(prompt_of(slot)) for slot in slots)
    admitted = tuple(admission(slot, prompt_of(slot), *row) for slot, row in zip(slots, rows, strict=True))
    yield Batch(1, slots, counts, ones, admissions=admitted)
    for step in range(2, 2 + num_steps):
        yield Batch(step, slots, ones, ones)
