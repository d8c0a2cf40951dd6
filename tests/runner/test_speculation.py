"""The runner of a model with drafts: what it refuses, what it tells early, and what the host knows of lengths."""

from __future__ import annotations

import pytest
import torch

from photon_grpc import LLM, demo
from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import ConfigError, InternalFailure
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.slot_table import SlotTable
from tests.kv_plans import kv_plan
from tests.runner.masks import masks
from tests.runner.models import model
from tests.runner.served import Served

GREEDY = SamplingParams(temperature=0.0)
ALL = range(320)


def runner_of(**more: object) -> ModelRunner:
    runner = Served(model("llama")[0], **more).assembled.runner  # type: ignore[arg-type]
    assert isinstance(runner, ModelRunner)
    return runner


def admission(slot: int, ids: tuple[int, ...], blocks: tuple[int, ...] = (1, 2), **more: object) -> Admission:
    return Admission(slot, ids, len(ids), 0, (blocks,), GREEDY, **more)  # type: ignore[arg-type]


def test_drafts_without_a_drafter_are_refused() -> None:
    runner = runner_of()
    runner.submit(Batch(1, (1,), (3,), (1,), admissions=(admission(1, (5, 9, 5)),))).result()
    with pytest.raises(InternalFailure, match="step 2 has 3 drafts a row, the runner makes 0"):
        runner.submit(Batch(2, (1,), (4,), (4,), drafts=3))


def test_more_drafts_than_the_runner_makes_are_refused() -> None:
    runner = runner_of(speculation="ngram", num_drafts=3)
    with pytest.raises(InternalFailure, match="step 1 has 5 drafts a row, the runner makes 3"):
        runner.submit(Batch(1, (1,), (6,), (6,), drafts=5))


def test_drafts_of_masked_rows_are_told_early_and_padded() -> None:
    runner = runner_of(speculation="ngram", num_drafts=3)
    text = (7, 8, 9, 7, 8)
    admissions = admission(1, text), admission(2, text, (3, 4))
    one = runner.submit(Batch(1, (1, 2), (5, 5), (1, 1), admissions=admissions, masked=(0, 1)))
    # Both go on as before, so that what follows is looked up.
    one.sample(masks({9}, {9}))
    assert one.result().ids == (9, 9)
    other = runner.submit(Batch(2, (1, 2), (4, 2), (4, 2), drafts=3, masked=(0, 1)))
    assert other.drafts() == (7, 8, 9, 7, -1, -1)
    other.sample(masks({7}, {6}, ALL, ALL, {5}, ALL, ALL, ALL))
    output = other.result()
    # The first draft of the first row was right, the second not; that of the second row was not.
    assert (output.ids, output.lengths) == ((7, 6, 5), (2, 1))
    assert runner.table.numbers.num_computed[[1, 2]].tolist() == [7, 6]


def test_the_host_knows_lengths_once_steps_are_read() -> None:
    table = SlotTable(3, 64, kv_plan(8), 320, torch.device("cpu"), max_drafts=3)
    first = Batch(1, (1, 2), (3, 3), (1, 1), admissions=(admission(1, (1, 5, 9)), admission(2, (1, 5, 9), (3, 4))))
    table.apply(first)
    table.advance(first)
    step = Batch(2, (1, 2), (4, 1), (4, 1), drafts=3)
    table.advance(step)
    assert (table.max_computed[1:], table.min_computed(1), table.min_computed(2)) == ([7, 4], 4, 4)
    table.advance(step)
    table.read(step, (2, 1))
    assert (table.max_computed[1:], table.min_computed(1)) == ([9, 5], 6)
    table.read(step, (4, 1))
    assert (table.max_computed[1:], table.min_computed(1)) == ([9, 5], 9)


def test_a_ban_ends_once_no_refused_draft_can_keep_it() -> None:
    table = SlotTable(2, 64, kv_plan(8), 320, torch.device("cpu"), max_drafts=3)
    banned = admission(1, (1, 5, 9), min_tokens=4, banned_until_min=(7,))
    first = Batch(1, (1,), (3,), (1,), admissions=(banned,))
    table.apply(first)
    table.advance(first)
    step = Batch(2, (1,), (4,), (4,), drafts=3)
    table.advance(step)
    plain = Batch(3, (1,), (1,), (1,))
    table.advance(plain)
    assert 1 in table.banned
    table.read(step, (3,))
    table.advance(plain)
    assert 1 not in table.banned


def test_ngrams_speed_up_what_repeats_and_change_nothing() -> None:
    prompts = [[5, 9, 9, 200, 3], [17] * 8, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [300]]
    plain, drafting = Served(model("llama")[0]), Served(model("llama")[0], speculation="ngram", num_drafts=3)
    assert plain.complete(prompts, 48) == drafting.complete(prompts, 48)
    alone = [
        SamplingParams(temperature=0.0, logit_bias=((token, 100.0), (token + 1, 99.0)), frequency_penalty=1.9)
        for token in (3, 40)
    ]
    for sampling in alone:
        before = [served.engine.stats.steps for served in (plain, drafting)]
        assert plain.complete([[1, 2]], 48, sampling=sampling) == drafting.complete([[1, 2]], 48, sampling=sampling)
        steps = [served.engine.stats.steps - count for served, count in zip((plain, drafting), before, strict=True)]
        # Two ids by turns.
        assert steps[1] < 0.6 * steps[0]


def test_answers_of_a_program_are_equal_and_drafts_are_counted() -> None:
    prompts = ["def fib(n):\n    ", "import os\nimport sys\n"]
    options = {"max_tokens": 40, "temperature": 0.7, "seed": 5, "num_outputs": 2, "stop_strings": ["\n\n\n"]}
    with LLM(device="cpu", max_num_seqs=4) as plain:
        expected = plain.generate(prompts, **options)
    for drafter in ("ngram", str(demo.DRAFT)):
        with LLM(device="cpu", max_num_seqs=4, speculative_model=drafter, speculation_control="fixed") as llm:
            found = llm.generate(prompts, **options)
        assert [each.text for each in found] == [each.text for each in expected]
        assert all(each.draft_tokens >= each.accepted_draft_tokens for each in found)
        assert 0 < sum(each.accepted_draft_tokens for each in found) < sum(len(each.token_ids) for each in found)
    assert not any(each.draft_tokens for each in expected)


def test_a_request_bounds_its_drafts() -> None:
    options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with LLM(device="cpu", max_num_seqs=4, speculative_model="ngram", speculation_control="fixed") as llm:
        drafts = {
            most: llm.generate(["x = 1\ny = 1\n"], speculation=most, **options)[0].draft_tokens for most in (0, 1, 7)
        }
    # Of one token a step at most, and of three.
    assert drafts[0] == 0 < drafts[1] < 40 < drafts[7] * 3


#: The model -> what drafts, in `make test`; the rest are `full`.
BEHIND = (("mistral", "ngram"), ("gemma3", "ngram"), ("qwen2-window", "llama"), ("deepseek2", "llama"))
FULL = (("gemma3", "llama"), ("deepseek2", "ngram"), *((each, "ngram") for each in ("mixtral", "phi3", "olmo2")))


@pytest.mark.parametrize(
    ("family", "drafter"), [*BEHIND, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)]
)
def test_drafts_change_nothing_behind_windows_latents_and_experts(family: str, drafter: str) -> None:
    """Prompts longer than windows, in chunks, with outputs that preempt each other."""
    prompts = [[5, 9, 9, 200, 3] * 9, [17] * 50, [*range(1, 60)], [300]]
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24)
    cache = CacheConfig(num_blocks=24, block_size=16)
    sampling = SamplingParams(0.8, seed=3, frequency_penalty=0.4)
    # The draft model has other layers, and no window.
    speculation = "ngram" if drafter == "ngram" else str(model(drafter)[0])
    found = []
    for flags in ({}, {"speculation": speculation, "num_drafts": 5}):
        served = Served(model(family)[0], scheduler=scheduler, cache=cache, **flags)  # type: ignore[arg-type]
        found.append([served.complete(prompts, 20), served.complete(prompts, 20, sampling=sampling)])
    assert found[0] == found[1]


def test_a_model_without_a_layer_that_keeps_all_blocks_is_refused_a_draft_model_before_its_weights_are_read() -> None:
    with pytest.raises(ConfigError, match="all layers of MistralForCausalLM have a sliding window") as raised:
        Served(model("mistral")[0], speculation=str(model("llama")[0]), num_drafts=3)
    assert raised.value.field == "speculative_model"
