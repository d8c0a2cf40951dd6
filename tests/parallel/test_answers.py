"""A program whose model is on several ranks answers as one process, whatever the options."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from photon_grpc import LLM, demo
from photon_grpc.compose import leading_rank
from photon_grpc.errors import StartupError, Unavailable
from tests.compose.matrix import FEATURES, answer, request
from tests.models import reference
from tests.properties.drawn_requests import Output
from tests.runner.heads import random_head
from tests.runner.models import model

#: Small enough that rows wait, are chunked and preempted.
CROWDED = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 40}
TEXTS = ["def fib(n):\n    ", "import os\n"]
PROMPTS = [tuple((7 * at + number) % 320 for at in range(11 * number + 3)) for number in range(8)]


def equal(mine: list[Output] | str, theirs: list[Output] | str) -> bool:
    """Ids and texts to the last one, log-probabilities within rounding."""
    if isinstance(mine, str) or isinstance(theirs, str):
        return mine == theirs
    return all(
        (a.token_ids, a.text, a.finish) == (b.token_ids, b.text, b.finish)
        and _close((a.scores, a.prompt_scores), (b.scores, b.prompt_scores))
        for a, b in zip(mine, theirs, strict=True)
    )


def _close(mine: object, theirs: object) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, abs_tol=1e-3)
    if isinstance(mine, tuple | list) and isinstance(theirs, tuple | list):
        return len(mine) == len(theirs) and all(map(_close, mine, theirs))
    return mine == theirs


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(device="cpu") as llm:
        yield llm


TP, EP, PP = "tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("split", [{TP: 2}, {TP: 4}, {PP: 2}, {TP: 2, PP: 2}], ids=str)
def test_every_option_answers_as_in_one_process(split: dict[str, int], alone: LLM) -> None:
    expected = {name: answer(alone, request((name,))) for name in FEATURES}
    with LLM(device="cpu", **split, **CROWDED) as llm:
        found = {name: answer(llm, request((name,))) for name in FEATURES}
    assert [name for name in FEATURES if not equal(found[name], expected[name])] == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "split", "options"),
    [
        ("llama", {TP: 2}, {}),
        ("qwen2", {TP: 2}, {}),
        ("qwen3", {TP: 2}, {}),
        ("demo", {TP: 2}, {"quantization": "int8-g64"}),
        ("qwen2", {TP: 2}, {"enable_prefix_caching": False, "enable_chunked_prefill": False}),
        ("llama", {TP: 2}, {"speculative_model": "ngram"}),
        ("llama", {TP: 2}, {"kv_cache_dtype": "fp8"}),
        ("llama", {TP: 2}, {"kv_layout": "contiguous"}),
        ("qwen3moe", {TP: 2}, {}),
        ("mixtral", {TP: 2}, {}),
        ("qwen3moe", {EP: 2}, {}),
        ("mixtral", {EP: 2}, {"quantization": "int8-g32"}),
        ("qwen3moe", {TP: 2, EP: 2}, {}),
        ("mixtral", {EP: 2, PP: 2}, {"speculative_model": "ngram"}),
        ("qwen2", {PP: 2}, {"enable_prefix_caching": False, "enable_chunked_prefill": False}),
        ("qwen3", {PP: 3}, {"kv_cache_dtype": "fp8"}),
        ("demo", {PP: 2}, {"quantization": "int8", "kv_layout": "contiguous"}),
        ("wide", {TP: 2}, {"quantization": "fp8-block"}),
        ("wide", {TP: 2}, {"quantization": "int4-g128"}),
        ("deepseek2", {TP: 2}, {}),
        ("deepseek2", {EP: 2}, {"speculative_model": "ngram"}),
        ("smollm3", {TP: 2}, {"kv_cache_dtype": "fp8"}),
        ("olmo2", {TP: 2}, {}),
    ],
    ids=str,
)
def test_families_and_formats_answer_as_in_one_process(
    family: str, split: dict[str, int], options: dict[str, object]
) -> None:
    directory = demo.TARGET if family == "demo" else model(family)[0]
    asked = {"max_tokens": 16, "temperature": 0.0, "num_outputs": 1, "ignore_eos": True}
    drawn = asked | {"temperature": 0.8, "top_p": 0.9, "seed": 5, "num_outputs": 2}

    def answers(llm: LLM) -> list[list[tuple[int, ...]]]:
        return [[output.token_ids for output in llm.generate(PROMPTS, **each)] for each in (asked, drawn)]

    with LLM(str(directory), device="cpu", **options) as one:
        expected = answers(one)
    with LLM(str(directory), device="cpu", **split, **(CROWDED | options)) as several:
        assert answers(several) == expected


@pytest.mark.full
@pytest.mark.parametrize("split", [{TP: 2}, {PP: 2}], ids=str)
def test_a_draft_model_is_whole_on_every_rank(split: dict[str, int], alone: LLM) -> None:
    prompt = "def fib(n):\n    "
    expected = [output.token_ids for output in alone.generate(prompt, max_tokens=32, temperature=0.0)]
    drafts = {"speculative_model": str(demo.DRAFT), "speculation_control": "fixed"}
    with LLM(device="cpu", **split, **drafts) as llm:
        outputs = llm.generate(prompt, max_tokens=32, temperature=0.0)
    assert [output.token_ids for output in outputs] == expected
    assert outputs[0].accepted_draft_tokens > 0


@pytest.mark.full
def test_a_head_for_drafts_is_whole_on_every_rank(alone: LLM, tmp_path: Path) -> None:
    random_head(tmp_path)
    expected = [output.token_ids for output in alone.generate(TEXTS, max_tokens=24, temperature=0.0)]
    drafts = {"speculative_model": str(tmp_path), "speculation_control": "fixed"}
    with LLM(device="cpu", tensor_parallel_size=2, **drafts) as llm:
        outputs = llm.generate(TEXTS, max_tokens=24, temperature=0.0)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.draft_tokens for output in outputs) > 0


def test_a_head_for_drafts_needs_one_stage(tmp_path: Path) -> None:
    random_head(tmp_path)
    with pytest.raises(StartupError, match="a head reads states after several layers, which are on"):
        LLM(device="cpu", pipeline_parallel_size=2, speculative_model=str(tmp_path))


@pytest.mark.full
def test_a_program_whose_rank_is_killed_fails_its_calls() -> None:
    with LLM(device="cpu", tensor_parallel_size=2) as llm:
        before = [output.text for output in llm.generate(TEXTS, max_tokens=4, temperature=0.0)]
        with pytest.raises(StartupError, match="another model of this program is computed by several ranks"):
            LLM(device="cpu", tensor_parallel_size=2)
        assert [output.text for output in llm.generate(TEXTS, max_tokens=4, temperature=0.0)] == before
        (pid,) = llm._program._runner._followers.pids  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            llm.generate(TEXTS, max_tokens=2000, ignore_eos=True)


def test_sizes_that_ranks_cannot_share_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference.save(reference.make_model("qwen3"), tmp_path)
    monkeypatch.setattr(leading_rank, "LeadingRank", pytest.fail)
    with pytest.raises(StartupError, match="num_kv_heads 2 cannot be shared out over 3 ranks"):
        LLM(str(tmp_path), device="cpu", tensor_parallel_size=3)
