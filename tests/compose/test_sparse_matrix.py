"""Models with experts and with latents: every option, and some pairs, in a crowded batch and drafted, as alone."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_grpc import LLM, demo
from photon_grpc.client import SyncClient
from photon_grpc.errors import NumericFailure
from tests.compose.matrix import FEATURES, PLAIN, TEMPLATE, answer, answers_together, request
from tests.compose.over_grpc import over_grpc
from tests.examples import examples
from tests.properties.drawn_requests import complete
from tests.runner.models import model

#: Options that are compared over the wire.
SERVED = ("drawn", "frequency", "outputs", "logprobs", "prompt_logprobs", "continued", "regex", "schema")
#: With few blocks and small steps sequences are preempted, prompts are split and steps overlap.
CROWDED: dict[str, Any] = {"max_num_seqs": 8, "num_blocks": 14, "block_size": 8, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module", params=["qwen3moe", "deepseek2", pytest.param("mixtral", marks=pytest.mark.full)])
def path(request: pytest.FixtureRequest) -> str:
    """Return a model of random weights with the tokenizer of the embedded one."""
    directory, _ = model(request.param, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(demo.DRAFT, name), directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)


@pytest.mark.timeout(400)
def test_every_option_and_some_pairs_answer_as_alone(path: str) -> None:
    pairs = random.Random(1).sample(list(combinations(FEATURES, 2)), examples(40))
    names = [*((name,) for name in FEATURES), *pairs]
    with LLM(path, device="cpu", dtype="float32", enable_prefix_caching=False, max_num_seqs=2, num_blocks=64) as llm:
        expected = {each: answer(llm, request(each)) for each in names}
        expected["plain",] = [output for one in PLAIN for output in complete(llm, one)]
    served = [each for each, told in expected.items() if not isinstance(told, str) and each != ("plain",)]
    assert {(name,) for name in FEATURES} < set(served)
    for more in ({}, {"speculative_model": "ngram", "num_speculative_tokens": 3, "speculation_control": "fixed"}):
        with LLM(path, device="cpu", dtype="float32", async_depth=1, **CROWDED, **more) as llm:
            answered = list(answers_together(llm, served))
        differing = [each for each, outputs in answered if outputs != expected[each]]
        assert differing == [], (len(answered), more)


def test_over_grpc_the_answers_are_the_same(path: str) -> None:
    def told(outputs: Iterable[Any]) -> list[Any]:
        return [(each.token_ids, each.text) for each in outputs]

    named = {name: request((name,)) for name in SERVED}
    drafted: dict[str, Any] = {"speculative_model": "ngram", "num_speculative_tokens": 3}
    with LLM(path, device="cpu", dtype="float32", **CROWDED, **drafted) as llm, over_grpc(llm) as address:
        expected = {name: told(complete(llm, one)) for name, one in named.items()}
        with SyncClient(address) as client, ThreadPoolExecutor(len(named)) as callers:
            calls = {
                name: callers.submit(client.generate, one.prompt, token_ids=True, **one.options)
                for name, one in named.items()
            }
            found = {name: told(call.result().outputs) for name, call in calls.items()}
    assert found == expected


def test_a_token_that_gives_a_router_nan_fails_its_request_alone(path: str, tmp_path: Path) -> None:
    prompt, options = [8, 9, 10] * 7, {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    sizes: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "num_blocks": 64}
    with LLM(path, **sizes) as llm:
        expected = list(llm.generate([prompt], **options)[0].token_ids)
    bad = next(token for token in range(100, 4096) if token not in expected)
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    # The router of the first layer with experts reads it.
    tensors["model.embed_tokens.weight"][bad] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with LLM(str(broken), **sizes) as llm:
        deltas = llm.stream(prompt, **options)
        found = list(next(deltas).token_ids)
        with pytest.raises(NumericFailure):
            llm.generate([[5, bad, 7]], **options)
        assert found + [token for delta in deltas for token in delta.token_ids] == expected
