"""A slot that is admitted to holds what its new sequence says, whatever was there before."""

from __future__ import annotations

import random

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams
from tests.runner.models import model
from tests.runner.served import Served
from tests.runner.tenants import BLOCK_SIZE, NUM_SEQS, TENANTS, outputs_of
from tests.runner.test_graphs import Replayed


def served(is_padded: bool) -> Served:
    if is_padded:
        return Replayed(num_seqs=NUM_SEQS)
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=100)
    return Served(model("llama")[0], cache=cache, scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS))


@pytest.mark.each_value
@pytest.mark.parametrize("is_padded", [False, True], ids=["eager", "padded"])
@pytest.mark.parametrize("kind", TENANTS)
def test_garbage_in_every_field_of_a_slot_changes_nothing_once_it_is_admitted_to(kind: str, is_padded: bool) -> None:
    runner = served(is_padded).assembled.runner
    expected = outputs_of(runner, kind, None)
    for seed in range(4):
        runner.cache.pages[0].fill_(torch.nan)
        assert outputs_of(runner, kind, random.Random(seed)) == expected


def test_who_bans_nothing_samples_what_the_one_before_could_not() -> None:
    runner = served(False).assembled.runner

    def ids(step: int, banned: tuple[int, ...]) -> tuple[int, ...]:
        sampling = SamplingParams(temperature=1.0, top_k=1, seed=step)
        admission = Admission(1, (3, 5, 9), 3, 0, ((1, 2),), sampling, min_tokens=8, banned_until_min=banned)
        batches = [Batch(step, (1,), (3,), (1,), left=(1,), admissions=(admission,)), *[Batch(0, (1,), (1,), (1,))] * 5]
        return tuple(token for batch in batches for token in runner.submit(batch).result().ids)

    free = ids(1, ())
    assert ids(2, free[:1]) != free
    assert ids(3, ()) == free
