"""Quantized weights in the whole program, over gRPC, with everything else on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from photon_grpc import LLM, demo
from photon_grpc.client import SyncClient
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.resolve import resolve
from photon_grpc.config.weight_bytes import kv_token_bytes, linear_bytes
from photon_grpc.service.processes import check_start

PROMPT = "def fib(n):\n    "
FLAGS = {"quantization": "int8-g64", "quantization_head": "int8", "quantization_embedding": "int8"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", **FLAGS, num_blocks=256) as llm:
        yield llm


def test_a_server_answers_with_quantized_weights_and_every_feature(llm: LLM, target: str) -> None:
    with SyncClient(target) as client:
        plain = client.generate(PROMPT * 12, max_tokens=12, temperature=0)
        again = client.generate(PROMPT * 12, max_tokens=12, temperature=0, num_outputs=2, logprobs=2)
        assert again.usage.cached_prompt_tokens > 0
        assert [tuple(output.token_ids) for output in again.outputs] == [tuple(plain.token_ids)] * 2
        schema = {"enum": ["fibonacci", "factorial"]}
        answer = client.generate(PROMPT, max_tokens=40, json_schema=json.dumps(schema), temperature=0)
        assert json.loads(answer.text) in schema["enum"]


def test_a_model_tells_what_its_format_saves(llm: LLM) -> None:
    model = read_model_dir(demo.TARGET)
    told = llm._program.model_facts().weight_bytes
    assert told is not None
    # The head is tied: it has the tensors of the embedding.
    of_embedding = model.vocab_size * (model.hidden_size + 4)
    of_layers = linear_bytes(model, None)
    assert told.held + told.saved == of_layers + 4 * model.vocab_size * model.hidden_size
    # An eighth of float32's bits with a scale of 4 bytes for 64 of them.
    assert told.held == of_layers * (64 + 4) // (4 * 64) + of_embedding
    assert told.kv_tokens_gained == told.saved // kv_token_bytes(model)


def test_doctor_names_the_numerics_of_the_format(llm: LLM) -> None:
    facts = llm._program.model_facts()
    name = "int8-g64, head int8, embedding int8"
    assert facts.quantization == name
    found = facts.numerics
    assert (found.weights, found.activations) == (name, "float32")
    flags = {"device": "cpu"} | FLAGS
    assert check_start.numerics_version(resolve(flags, {}).config) == found.version
    for other in ({"quantization": "w8a8"}, {"quantization_embedding": "none"}):
        assert check_start.numerics_version(resolve(flags | other, {}).config) != found.version


def test_a_draft_model_keeps_the_format_of_its_own_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    flags = {"quantization": "int8", "quantization_head": "int8", "speculative_model": str(demo.DRAFT)}
    with caplog.at_level("INFO"), LLM(device="cpu", num_blocks=64, max_num_seqs=2, **flags) as llm:
        llm.generate(PROMPT, max_tokens=4, temperature=0)
        assert llm._program.model_facts().quantization == "int8, head int8"
    # Of the target alone.
    assert caplog.text.count("weights: int8, head int8") == 1
    assert caplog.text.count("more KV blocks than in float32") == 1
