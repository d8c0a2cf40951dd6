"""Families with windows, partial and missing rotary embedding or other norms, served: transformers' greedy output.

A greedy output is transformers' own if each of its tokens is transformers' most likely one after those before it, which
one call of the reference tells for the whole output.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from tests.runner.models import FURTHER, WINDOW, model, most_likely
from tests.runner.served import Served

BLOCK = 16
#: Around the window, two windows, and borders of pages.
LENGTHS = (
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    2 * WINDOW - 1,
    2 * WINDOW,
    2 * WINDOW + 1,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    1,
    130,
)
#: Longer than a window.
OUTPUT = 40


def prompts(seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(320) for _ in range(length)] for length in LENGTHS]


def served(directory: Path, num_blocks: int = 400, **scheduler: Any) -> Served:
    cache = CacheConfig(block_size=BLOCK, num_blocks=num_blocks)
    return Served(directory, cache=cache, scheduler=SchedulerConfig(**({"max_num_seqs": 16} | scheduler)))


CHUNKS = {"max_num_batched_tokens": 29, "async_depth": 0}
#: Whose prompts are also computed whole in `make test`; those of the others in chunks.
WHOLE = ("gemma3", "deepseek2")


@pytest.mark.parametrize(
    ("family", "scheduler"),
    [
        *(
            pytest.param(each, CHUNKS, id=f"{each}-chunks", marks=[pytest.mark.full] if each == "mixtral" else [])
            for each in FURTHER
        ),
        *(
            pytest.param(each, {}, id=f"{each}-whole", marks=[] if each in WHOLE else [pytest.mark.full])
            for each in FURTHER
        ),
    ],
)
def test_tokens_equal_transformers_from_every_length(family: str, scheduler: dict[str, Any]) -> None:
    directory, reference = model(family)
    asked = prompts()
    told = served(directory, **scheduler).complete(asked, OUTPUT)
    assert len({tuple(output) for output in told}) == len(asked)
    for prompt, output in zip(asked, told, strict=True):
        assert output == most_likely(reference, prompt, output)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen3moe"])
def test_prefix_hits_and_several_outputs_across_a_window_say_the_same(family: str) -> None:
    directory, _ = model(family)
    asked = prompts(4)
    alone = served(directory)
    expected = [alone.complete([prompt], 8)[0] for prompt in asked]
    runs = served(directory)
    for _ in range(2):
        assert runs.complete(asked, 8) == expected
    handle = runs.add(asked[-1], 8, num_outputs=2)
    runs.run()
    assert [runs.outputs[handle + index].ids for index in range(2)] == [expected[-1]] * 2


def test_preemption_behind_windows_changes_nothing() -> None:
    directory, reference = model("gemma3")
    asked = prompts(5)
    few = served(directory, num_blocks=120)
    told = few.complete(asked, 40)
    assert few.engine.scheduler.num_preemptions > 0
    for prompt, output in zip(asked, told, strict=True):
        assert output == most_likely(reference, prompt, output)


@pytest.mark.parametrize("family", ["qwen3moe", "deepseek2"])
def test_experts_say_the_same_where_sequences_lose_their_blocks(family: str) -> None:
    directory, reference = model(family)
    asked = [prompt for prompt in prompts(6) if len(prompt) < 60]
    runs = served(directory, num_blocks=14, max_num_batched_tokens=40)
    told = runs.complete(asked, 40)
    assert runs.engine.scheduler.num_preemptions > 0
    for prompt, output in zip(asked, told, strict=True):
        assert output == most_likely(reference, prompt, output)
