"""A step is launched without waiting for the device, whatever it changes before it computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import Admission, Batch, Growth
from photon_grpc.core.request import SamplingParams
from tests.runner.models import model
from tests.runner.served import Served

pytestmark = pytest.mark.gpu

FILTERED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=7)
BANNED = Admission(1, (1, 5, 9, 7, 3), 5, 0, ((1,),), FILTERED, min_tokens=6, banned_until_min=(7, 8))
GREEDY = Admission(2, (2, 5, 9, 7, 3, 4, 4), 7, 0, ((2,),), SamplingParams(0.0))
#: Begins with the first six tokens of GREEDY, in a copy of their block.
FORKED = Admission(3, GREEDY.ids, 7, 6, ((3,),), SamplingParams(1.0, seed=1), output_index=1)
BATCHES = (
    Batch(1, (1, 2), (5, 7), (1, 1), left=(1, 2, 3), admissions=(BANNED, GREEDY)),
    Batch(2, (1, 2), (1, 1), (1, 1)),
    Batch(3, (1, 2, 3), (1, 1, 1), (1, 1, 1), admissions=(FORKED,), grown=(Growth(2, 0, 1, (4,)),), copies=((2, 3),)),
    Batch(4, (1, 2, 3), (1, 1, 1), (1, 1, 1)),
    Batch(5, (1, 3), (1, 1), (1, 1), left=(2,), grown=(Growth(1, 0, 1, (5,)), Growth(3, 0, 1, (6,)))),
)


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_admissions_growth_bans_and_copies_are_launched_without_waiting(eager: bool) -> None:
    served = Served(
        model("llama")[0],
        device="cuda",
        eager=eager,
        dtype="float32",
        cache=CacheConfig(block_size=8, num_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    runner = served.assembled.runner
    # Once before: kernels are loaded when they are first met.
    expected = [runner.submit(batch).result() for batch in BATCHES]
    with waiting_is_an_error():
        pending = [runner.submit(batch) for batch in BATCHES]
    outputs = [each.result() for each in pending]
    assert not any(output.faults for output in (*expected, *outputs))
    assert [output.ids for output in outputs] == [output.ids for output in expected]
