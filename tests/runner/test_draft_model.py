"""A draft model beside the real runner: outputs are those without it, and one that agrees is kept."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import ConfigError
from photon_grpc.runner.model_runner import ModelRunner
from tests.runner.heads import replay_drafts
from tests.runner.models import WINDOWED, model
from tests.runner.served import Served

PROMPTS = [[5, 9, 9, 200, 3], [17] * 8, [*range(1, 30)], [300]]
SAMPLINGS = (
    SamplingParams(0.0),
    SamplingParams(1.1, seed=3),
    SamplingParams(0.9, seed=4, top_k=40, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(0.0, logit_bias=((5, 4.0),), presence_penalty=1.0),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of the same vocabulary that seldom agrees."""
    directory = tmp_path_factory.mktemp("small")
    torch.manual_seed(3)
    card = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
        vocab_size=320, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(card).save_pretrained(directory)
    return directory


def outputs(served: Served, **more: object) -> list[list[int]]:
    handles = [
        served.add(prompt, 24, sampling, **more)  # type: ignore[arg-type]
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    served.run()
    return [served.outputs[handle].ids for handle in handles]


@cache
def without_drafts(family: str = "llama", **more: int) -> list[list[int]]:
    return outputs(Served(model(family)[0]), **more)


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", WINDOWED])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_draft_model_equal_to_the_model_has_every_draft_kept(family: str, num_drafts: int) -> None:
    directory, _ = model(family)
    drafting = Served(directory, speculation=str(directory), num_drafts=num_drafts)
    assert outputs(drafting) == without_drafts(family)
    # The prompts' step, and then 23 ids a row.
    assert drafting.engine.stats.steps <= 1 + -(-23 // (num_drafts + 1)) + 1


@pytest.mark.parametrize(
    ("num_blocks", "scheduler"),
    [
        (64, {"max_num_batched_tokens": 16}),
        (12, {}),
        pytest.param(64, {}, marks=pytest.mark.full),
        pytest.param(12, {"max_num_batched_tokens": 16}, marks=pytest.mark.full),
    ],
)
def test_a_draft_model_that_disagrees_changes_nothing(small: Path, num_blocks: int, scheduler: dict[str, int]) -> None:
    directory, _ = model("llama")
    cache, limits = CacheConfig(num_blocks=num_blocks, block_size=8), SchedulerConfig(max_num_seqs=8, **scheduler)
    drafting = Served(directory, cache=cache, scheduler=limits, speculation=str(small), num_drafts=3)
    assert outputs(drafting) == without_drafts()
    assert bool(drafting.engine.scheduler.num_preemptions) == (num_blocks == 12)
    # From the prefix cache, and with several outputs.
    assert outputs(drafting, num_outputs=2) == without_drafts(num_outputs=2)


def changed(directory: Path, to: Path, **keys: object) -> Path:
    shutil.copytree(directory, to)
    card = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(card | keys))
    return to


def test_a_model_that_cannot_draft_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    directory, _ = model("llama")
    for keys, message in (
        ({"vocab_size": 100}, "its vocabulary has 100 ids, that of the model 320"),
        ({"max_position_embeddings": 300}, "its context of 300 tokens is shorter than the model's 512"),
    ):
        other = changed(small, tmp_path / str(len(message)), **keys)
        with pytest.raises(ConfigError, match=message):
            Served(directory, speculation=str(other))
    with pytest.raises(ConfigError, match="or ngram"):
        Served(directory, speculation="n-gram")


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_in_replays_are_those_of_single_launches(num_drafts: int) -> None:
    directory, _ = model("llama")
    drafting = Served(directory, speculation=str(directory), num_drafts=num_drafts)
    runner = drafting.assembled.runner
    assert isinstance(runner, ModelRunner)
    graphs = replay_drafts(runner)
    assert outputs(drafting) == without_drafts() and {size for _, size in graphs._replays} == {4}
    # It agrees with itself: a draft of a replay that differed would cost a step.
    assert drafting.engine.stats.steps <= 1 + -(-23 // (num_drafts + 1)) + 1


@pytest.mark.parametrize("chunk", [2048, 16])
def test_rows_with_other_numbers_of_drafts_and_plain_steps_between_are_replayed_too(chunk: int) -> None:
    directory, _ = model("llama")
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=chunk)
    steps = []
    for in_replays in (False, True):
        served = Served(directory, scheduler=scheduler, speculation=str(directory), num_drafts=3)
        runner = served.assembled.runner
        assert isinstance(runner, ModelRunner)
        graphs = replay_drafts(runner) if in_replays else None
        handles = [
            served.add(prompt, 24, sampling, max_drafts=most)
            for prompt, sampling, most in zip(PROMPTS, SAMPLINGS, (1, 3, 0, 2), strict=True)
        ]
        for _ in range(5):
            served.step()
        # Prompts come into steps of the others, which draft nothing then.
        late = [served.add(prompt, 12) for prompt in PROMPTS]
        served.run()
        steps.append(served.engine.stats.steps)
        assert [served.outputs[handle].ids for handle in handles] == without_drafts()
        assert all(len(served.outputs[handle].ids) == 12 for handle in late)
        assert graphs is None or {name for name, _ in graphs._replays} == {2, 8, "further"}
    # It agrees with itself: drafts of a replay that differed would cost steps.
    assert steps[0] == steps[1]
