"""Penalties, biases and allowed ids of the real runner on a GPU, in float32.

Outputs are those of transformers, launched one by one or replayed, and those of a CPU in batches of any size.
"""

from __future__ import annotations

import functools

import pytest

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.request import SamplingParams
from tests.runner.models import model
from tests.runner.penalised import PROMPTS, WAYS, expected, shaped
from tests.runner.served import Served
from tests.runner.test_greedy import prompts

pytestmark = pytest.mark.gpu
NUM_TOKENS = 16
SAMPLED = SamplingParams(
    temperature=1.3, seed=3, frequency_penalty=1.5, presence_penalty=0.2, repetition_penalty=1.3, logit_bias=((7, 2.0),)
)


@functools.cache
def served(device: str, *, eager: bool = False, num_seqs: int = 16, num_blocks: int = 100) -> Served:
    return Served(
        model("llama")[0],
        device=device,
        eager=eager,
        dtype="float32",
        cache=CacheConfig(block_size=8, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=num_seqs),
    )


@functools.cache
def of_transformers(way: str) -> list[list[int]]:
    return [expected(prompt, WAYS[way] if way in WAYS else shaped(), NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_transformers_logits(way: str, eager: bool) -> None:
    assert served("cuda", eager=eager).complete(PROMPTS, NUM_TOKENS, sampling=WAYS[way]) == of_transformers(way)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_all_ways_at_once_beside_plain_rows_and_then_plain_rows_alone(eager: bool) -> None:
    here = served("cuda", eager=eager)
    handles = {way: here.add(PROMPTS[at % 4], NUM_TOKENS, WAYS.get(way, shaped())) for at, way in enumerate(ALL)}
    here.run()
    for at, (way, handle) in enumerate(handles.items()):
        assert here.outputs[handle].ids == of_transformers(way)[at % 4], way
    assert here.complete(PROMPTS, NUM_TOKENS) == of_transformers("plain")


ALL = (*WAYS, "plain", "plain too")


def test_preempted_outputs_count_again() -> None:
    small = Served(
        model("llama")[0],
        device="cuda",
        dtype="float32",
        cache=CacheConfig(num_blocks=8, block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, async_depth=1),
    )
    assert small.complete(PROMPTS, 24, sampling=WAYS["all"]) == [expected(each, WAYS["all"], 24) for each in PROMPTS]
    assert small.engine.scheduler.num_preemptions


def test_what_an_output_continues_from_counts_as_output() -> None:
    here, whole = served("cuda"), of_transformers("all")[0]
    handles = [here.add(PROMPTS[0], NUM_TOKENS, WAYS["all"], continued_ids=tuple(whole[:cut])) for cut in (1, 7, 15)]
    here.run()
    assert [here.outputs[handle].ids for handle in handles] == [whole[1:], whole[7:], whole[15:]]


def test_outputs_of_one_request_count_for_themselves() -> None:
    found = []
    for here in (served("cpu"), served("cuda")):
        handle = here.add(PROMPTS[2], 12, SAMPLED, num_outputs=3)
        here.run()
        found.append([here.outputs[handle + index].ids for index in range(3)])
    assert found[0] == found[1] and len({tuple(ids) for ids in found[0]}) == 3


@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
def test_any_number_of_rows_samples_what_a_cpu_samples(num_rows: int) -> None:
    """Some rows ban ids until a minimum length."""
    asked = prompts(num_rows, tuple(1 + row % 9 for row in range(num_rows)))
    found = []
    for device in ("cpu", "cuda"):
        here = served(device, num_seqs=256, num_blocks=1024)
        handles = [
            here.add(prompt, 12, (WAYS["all"], SAMPLED)[row % 2], min_tokens=6 * (row % 3), stop=(3, 40, 100, 7))
            for row, prompt in enumerate(asked)
        ]
        here.run()
        found.append([here.outputs[handle].ids for handle in handles])
    assert found[0] == found[1]
