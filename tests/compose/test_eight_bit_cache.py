"""Keys and values of 8 bits in the whole program, over gRPC, with everything else on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from photon_grpc import LLM, demo
from photon_grpc.client import SyncClient
from photon_grpc.config.kv_calibration import FILE
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.resolve import resolve
from photon_grpc.models.kv_scales import find_kv_scales
from photon_grpc.service.processes import check_start

PROMPT = "def fib(n):\n    "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", kv_cache_dtype="fp8", num_blocks=64, max_num_batched_tokens=48) as llm:
        yield llm


def test_a_server_answers_over_8_bits_with_every_feature(llm: LLM, target: str) -> None:
    with SyncClient(target) as client:
        plain = client.generate(PROMPT * 12, max_tokens=12, temperature=0)
        again = client.generate(PROMPT * 12, max_tokens=12, temperature=0, num_outputs=2, logprobs=2)
        assert again.usage.cached_prompt_tokens > 0
        assert [tuple(output.token_ids) for output in again.outputs] == [tuple(plain.token_ids)] * 2
        drawn = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "repetition_penalty": 1.2, "top_p": 0.9}
        assert client.generate(PROMPT, **drawn).token_ids == client.generate(PROMPT, **drawn).token_ids
        schema = {"enum": ["fibonacci", "factorial"]}
        answer = client.generate(PROMPT, max_tokens=40, json_schema=json.dumps(schema), temperature=0)
        assert json.loads(answer.text) in schema["enum"]


def test_it_says_what_16_bits_say_of_code_that_it_knows(llm: LLM) -> None:
    with LLM(device="cpu", num_blocks=64) as exact:
        asked = {"max_tokens": 8, "temperature": 0.0}
        assert llm.generate([PROMPT], **asked)[0].text == exact.generate([PROMPT], **asked)[0].text


def test_the_numerics_name_form_and_scales(llm: LLM) -> None:
    found = llm._program.model_facts().numerics
    scales = find_kv_scales(read_model_dir(demo.TARGET), "")
    assert scales.source == str(demo.TARGET / FILE)
    assert found.kv_cache == f"float8_e4m3fn, scales {scales.digest}"
    flags = {"device": "cpu", "kv_cache_dtype": "fp8"}
    assert check_start.numerics_version(resolve(flags, {}).config) == found.version
    assert check_start.numerics_version(resolve({"device": "cpu"}, {}).config) != found.version
