"""The number of threads that compute a step on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.runner.drafting import Drafter
from photon_grpc.runner.step import Launch, SampledTokens, Tail

#: Parameters below which one token's operations are over before a second thread has woken up: the embedded model
#: (6.6 million) made 385 tokens/s with one and 354 with two, both cores idle, and 412 and 172 with one of them busy.
SMALL_MODEL = 50_000_000

#: Parameters × tokens up to which a step of a small model has one thread. A product of 256 × 1,280 weights with 64 rows
#: took 1.2 ms with one and 0.9 with two, with 128 rows 2.7 and 1.5, with 256 rows 5.7 and 3.4, both cores busy.
MAX_SMALL_STEP = 1 << 29


class SmallStepsAlone:
    """Launches of small steps of a small model in one thread, and of large ones, mostly prompts, in all threads.

    Args:
        launch: launches any step.
        num_parameters: the parameters of the model.
    """

    def __init__(self, launch: Launch, num_parameters: int) -> None:
        self._launch = launch
        self._max_tokens = MAX_SMALL_STEP // num_parameters

    def __call__(self, batch: Batch) -> Tail:
        if sum(batch.counts) > self._max_tokens:
            return self._launch(batch)
        with _one_thread():
            tail = self._launch(batch)

        def alone() -> SampledTokens:
            with _one_thread():
                return tail()

        return alone


class SmallDraftsAlone:
    """A drafter of small steps of a small model in one thread.

    Args:
        drafter: makes the drafts.
        num_parameters: the parameters of the served model, which the drafter's are below.
    """

    def __init__(self, drafter: Drafter, num_parameters: int) -> None:
        self._drafter = drafter
        self._max_tokens = MAX_SMALL_STEP // num_parameters

    @property
    def max_drafts(self) -> int:
        return self._drafter.max_drafts

    def draft(self, batch: Batch) -> None:
        with _one_thread():
            self._drafter.draft(batch)

    def ingest(self, batch: Batch) -> None:
        if sum(batch.counts) > self._max_tokens:
            self._drafter.ingest(batch)
            return
        with _one_thread():
            self._drafter.ingest(batch)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
