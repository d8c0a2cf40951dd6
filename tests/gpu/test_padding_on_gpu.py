"""On a GPU, in float32: padding and free slots change nothing, and neither does a device that is late."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.step import StepShape, Tail
from tests.runner.models import model
from tests.runner.padding import LEVELS, MAX_MODEL_LEN, NUM_SEQS, SPECULATION, check, shapes
from tests.runner.served import Served
from tests.runner.test_greedy import prompts

pytestmark = pytest.mark.gpu


@functools.cache
def runner(eager: bool) -> ModelRunner:
    served = Served(
        model("llama")[0],
        device="cuda",
        eager=eager,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        speculation="ngram",
        num_drafts=SPECULATION.max_drafts,
        cache=CacheConfig(block_size=8, num_blocks=NUM_SEQS * MAX_MODEL_LEN // 8),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS),
    )
    return served.assembled.runner  # type: ignore[return-value]


@pytest.mark.parametrize("shape", shapes(), ids=lambda shape: f"{shape.kind}-{shape.num_tokens}-{shape.num_rows}")
@torch.inference_mode()
def test_padding_and_free_slots_change_nothing(shape: StepShape) -> None:
    for level in LEVELS:
        check(runner(False), runner(True), shape, level)


def sleep(rng: random.Random) -> None:
    """Sleep for up to about a millisecond of the device's time."""
    torch.cuda._sleep(rng.randrange(1, 2_000_000))


def sleeping_before(function: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
    def late(*arguments: Any) -> Any:
        sleep(rng)
        return function(*arguments)

    return late


def make_late(runner: Any, rng: random.Random) -> None:
    """Make the device sleep before changes, copies, bodies and tails, and before ids are read."""
    launch = runner.launch_body

    def late(batch: Batch) -> Tail:
        sleep(rng)
        tail = launch(batch)

        def late_tail() -> Any:
            sleep(rng)
            sampled = tail()
            sleep(rng)
            return sampled

        return late_tail

    runner.launch_body = late
    for owner, name in ((runner.table, "apply"), (runner.cache, "copy")):
        setattr(owner, name, sleeping_before(getattr(owner, name), rng))


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_device_that_is_late_changes_nothing(eager: bool) -> None:
    samplings = (SamplingParams(0.0), SamplingParams(1.1, seed=1), SamplingParams(0.8, top_p=0.9, top_k=30, seed=2))
    outputs = []
    for is_late in (False, True):
        served = Served(
            model("llama")[0],
            device="cuda",
            eager=eager,
            dtype="float32",
            cache=CacheConfig(block_size=4, num_blocks=40),
            scheduler=SchedulerConfig(async_depth=1, max_num_batched_tokens=24),
        )
        if is_late:
            make_late(served.assembled.runner, random.Random(5))
        for number, prompt in enumerate(prompts(6)):
            served.add(prompt, 16, samplings[number % 3], num_outputs=1 + number % 2, min_tokens=4, stop=(7, 9))
        served.run()
        outputs.append({handle: output.ids for handle, output in served.outputs.items()})
    assert outputs[0] == outputs[1]
