"""A CPU's threads: one for the small steps of a small model, all for the others, and afterwards as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from photon_grpc.core.batch import Batch
from photon_grpc.runner.intra_op_threads import MAX_SMALL_STEP, SmallStepsAlone
from photon_grpc.runner.step import SampledTokens, Tail

NUM_PARAMETERS = MAX_SMALL_STEP // 100


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Seen:
    """A launch that writes down how many threads its body and its tail have."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self, batch: Batch) -> Tail:
        self.threads.append(torch.get_num_threads())

        def tail() -> SampledTokens:
            self.threads.append(torch.get_num_threads())
            return SampledTokens(torch.zeros(len(batch.slots), dtype=torch.int64))

        return tail


@pytest.mark.parametrize(("counts", "threads"), [((1,), 1), ((1, 99), 1), ((2, 99), 2), ((1000,), 2)])
def test_a_step_has_the_threads_that_its_work_is_worth(counts: tuple[int, ...], threads: int) -> None:
    seen = Seen()
    slots = tuple(range(1, len(counts) + 1))
    tail = SmallStepsAlone(seen, NUM_PARAMETERS)(Batch(0, slots, counts, (1,) * len(counts)))
    assert torch.get_num_threads() == 2
    tail()
    assert seen.threads == [threads, threads]
    assert torch.get_num_threads() == 2


def test_a_step_that_fails_leaves_the_threads_as_they_were() -> None:
    def failing(batch: Batch) -> Tail:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        SmallStepsAlone(failing, NUM_PARAMETERS)(Batch(0, (1,), (1,), (1,)))
    assert torch.get_num_threads() == 2
