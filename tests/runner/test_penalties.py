"""Penalties, biases and allowed ids of the real runner.

They are those of transformers, or of their formula over its logits, whatever is in the same batch, after preemption and
when resumed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.request import SamplingParams
from photon_grpc.frontend.model import RequestLimits
from photon_grpc.kernels.sampling import penalties
from tests.runner.models import greedy, model
from tests.runner.penalised import PROMPTS, WAYS, Expected, expected, shaped
from tests.runner.served import Served


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(model("llama")[0])


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_transformers_logits(served: Served, way: str) -> None:
    handles = [served.add(prompt, 16, WAYS[way]) for prompt in PROMPTS]
    served.run()
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert served.outputs[handle].ids == expected(prompt, WAYS[way], 16), prompt


def test_ways_differ() -> None:
    """What changes no output tests nothing."""
    plain = [greedy(model("llama")[1], prompt, 16) for prompt in PROMPTS]
    for way, sampling in WAYS.items():
        assert any(expected(prompt, sampling, 16) != each for prompt, each in zip(PROMPTS, plain, strict=True)), way


def test_all_ways_at_once_beside_plain_rows(served: Served) -> None:
    ways = [*WAYS.values(), shaped(), shaped()]
    handles = [served.add(PROMPTS[at % 4], 16, way) for at, way in enumerate(ways)]
    served.run()
    for at, (way, handle) in enumerate(zip(ways, handles, strict=True)):
        assert served.outputs[handle].ids == expected(PROMPTS[at % 4], way, 16)


def test_preempted_outputs_count_again() -> None:
    served = Served(
        model("llama")[0],
        cache=CacheConfig(num_blocks=8, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
    )
    way = WAYS["all"]
    handles = [served.add(prompt, 24, way) for prompt in PROMPTS]
    served.run()
    assert served.engine.scheduler.num_preemptions
    assert [served.outputs[handle].ids for handle in handles] == [expected(prompt, way, 24) for prompt in PROMPTS]


def test_what_an_output_continues_from_counts_as_output(served: Served) -> None:
    way, prompt = WAYS["all"], PROMPTS[0]
    whole = expected(prompt, way, 16)
    handles = [served.add(prompt, 16, way, continued_ids=tuple(whole[:cut])) for cut in (1, 7, 15)]
    served.run()
    assert [served.outputs[handle].ids for handle in handles] == [whole[1:], whole[7:], whole[15:]]


def test_outputs_of_one_request_count_for_themselves(served: Served) -> None:
    way = SamplingParams(temperature=1.3, seed=3, frequency_penalty=1.5, repetition_penalty=1.3)
    handle = served.add(PROMPTS[2], 12, way, num_outputs=3)
    served.run()
    together = [served.outputs[handle + index].ids for index in range(3)]
    assert together[0] == served.complete([PROMPTS[2]], 12, sampling=way)[0]
    assert len({tuple(ids) for ids in together}) == 3


def test_a_seat_is_left_clean(served: Served) -> None:
    plain = served.complete(PROMPTS, 8)
    served.complete(PROMPTS * 2, 8, sampling=WAYS["all"])
    assert served.complete(PROMPTS, 8) == plain
    table = served.assembled.runner.table
    assert not table.processed


def test_allowed_ids_that_are_banned_leave_nothing_to_sample(served: Served) -> None:
    way = shaped(allowed_token_ids=(7, 8))
    alone, other = served.add([1, 2], 5, way, min_tokens=3, stop=(7, 8)), served.add([3, 4], 5)
    served.run()
    failed = served.outputs[alone].failed
    assert failed is not None and failed.fault.reason == "INVALID_CONSTRAINT"
    assert "sampling.allowed_token_ids and stop.min_tokens leave no id" in failed.fault.message
    assert failed.fault.field == "sampling.allowed_token_ids"
    assert len(served.outputs[other].ids) == 5


def test_frequencies_of_samples_are_those_of_the_changed_softmax(served: Served) -> None:
    """Chi-square of the first token over 1,000 seeds, against the softmax of the formula."""
    kept = tuple(range(0, 320, 40))
    way: dict[str, Any] = {"repetition_penalty": 1.5, "logit_bias": ((40, 1.0), (80, -1.0))}
    way |= {"allowed_token_ids": kept}
    prompt, num_samples, seen = [40, 120, 40, 7], 1000, Counter[int]()
    for first in range(0, num_samples, 500):
        samplings = [SamplingParams(temperature=1.0, seed=first + seed, **way) for seed in range(500)]
        handles = [served.add(prompt, 1, each) for each in samplings]
        served.run()
        seen.update(served.outputs[handle].ids[0] for handle in handles)
    with torch.inference_mode():
        x = Expected(model("llama")[1], SamplingParams(temperature=1.0, **way), prompt, len(prompt)).logits()
    probability = x.softmax(-1)
    wanted = {token: num_samples * float(probability[token]) for token in kept}
    statistic = sum((seen[token] - count) ** 2 / count for token, count in wanted.items())
    assert set(seen) <= set(kept)
    # The 99.99 % quantile for 7 degrees of freedom.
    assert statistic < 29.9


def test_the_table_holds_as_many_biases_as_a_request_may_have() -> None:
    assert RequestLimits().max_logit_bias == penalties.MAX_BIASES


def test_counts_end_at_the_most_that_fifteen_bits_hold() -> None:
    counts = penalties.counted([3, 3, 4], [4] * 40_000 + [5], 8)
    assert counts.view("uint16").tolist() == [0, 0, 0, 0x8000, 0xFFFF, 1, 0, 0]
    held = torch.from_numpy(counts.copy()).view(1, 8).repeat(2, 1)
    nothing = torch.zeros(2)
    state = penalties.Penalties(held, nothing, nothing, nothing, nothing.long(), nothing.int(), nothing)
    penalties.count_reference(torch.tensor([1]), torch.tensor([1]), torch.tensor([4]), state)
    penalties.count_reference(torch.tensor([1]), torch.tensor([1]), torch.tensor([5]), state)
    penalties.count_reference(torch.tensor([1]), torch.tensor([0]), torch.tensor([5]), state)
    penalties.count_reference(torch.tensor([1]), torch.tensor([1]), torch.tensor([-1]), state)
    assert held[1].tolist() == [0, 0, 0, -0x8000, -1, 2, 0, 0]
