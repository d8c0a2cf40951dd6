"""Served models made from directories, and the facts about them that callers get."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.model_json import GenerationDefaults
from photon_grpc.core.ask import ChatInput, ChatMessage
from photon_grpc.errors import ModelLoadError
from photon_grpc.frontend.input.prompt import encode
from photon_grpc.frontend.model import ServedModel
from tests.frontend.fake_engine import FACTS, FEATURES, NEUTRAL
from tests.frontend.small_tokenizers import definition
from tests.frontend.test_chat import LLAMA3

DEMO = Path(__file__).parents[2] / "photon_grpc" / "demo" / "target"


@pytest.fixture
def model_config(tmp_path: Path) -> ModelConfig:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "eos_token_id": 404,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [401, 404], "temperature": 0.6, "top_k": 0})
    )
    (tmp_path / "tokenizer.json").write_text(definition("byte_level"))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>"}, "chat_template": LLAMA3}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    return read_model_dir(tmp_path)


def test_a_directory_gives_tokenizer_template_and_defaults(model_config: ModelConfig) -> None:
    model = ServedModel.from_config(model_config, ("a", "b"), max_message_bytes=1000)
    facts = model.facts(None)
    assert (facts.name, facts.aliases, facts.max_context_tokens, facts.vocab_size) == ("a", ("b",), 256, 512)
    assert facts.eos_token_ids == (401, 404)
    assert facts.default_sampling == structs.replace(NEUTRAL, temperature=0.6)
    assert facts.features == ("TEXT", "CHAT", "JSON_SCHEMA", "REGEX", "CHOICES", "GRAMMAR", "PROTOBUF", *FEATURES)
    assert facts.limits.max_message_bytes == 1000
    assert model.tokenizer is not None
    ids = encode(ChatInput((ChatMessage("user", "hi"),)), model.tokenizer, model.template, 100)
    spelled = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert spelled.startswith("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>")


def test_limits_of_the_engine_override_those_of_the_directory(model_config: ModelConfig) -> None:
    facts = ServedModel.from_config(model_config).facts(FACTS)
    assert facts.name == model_config.path.name
    assert (facts.max_context_tokens, facts.dtype, facts.limits.max_num_outputs) == (128, "float32", 8)
    assert "GRAMMAR" not in facts.features and FACTS.has_grammars is False


def test_without_a_template_or_tokenizer_the_features_are_missing(model_config: ModelConfig) -> None:
    assert "CHAT" not in ServedModel.from_config(replace(model_config, chat_template=None)).facts(None).features
    bare = ServedModel.from_config(replace(model_config, has_tokenizer=False))
    assert bare.tokenizer is None
    assert bare.facts(None).features == FEATURES


def test_generation_defaults_that_are_unset_stay_neutral(model_config: ModelConfig) -> None:
    defaults = (
        ServedModel.from_config(replace(model_config, generation=GenerationDefaults(top_p=0.9)))
        .facts(None)
        .default_sampling
    )
    assert defaults == structs.replace(NEUTRAL, top_p=0.9)


def test_invalid_files_are_named(model_config: ModelConfig) -> None:
    with pytest.raises(ModelLoadError, match="line 1"):
        ServedModel.from_config(replace(model_config, chat_template="{% if %}"))
    (model_config.path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        ServedModel.from_config(model_config)


@pytest.mark.skipif(not (DEMO / "tokenizer.json").exists(), reason="the embedded model is not there")
def test_the_embedded_model_encodes_and_decodes() -> None:
    from transformers import AutoTokenizer

    model = ServedModel.from_config(read_model_dir(DEMO))
    reference = AutoTokenizer.from_pretrained(DEMO)
    assert model.tokenizer is not None
    for text in ("def fib(n):\n    return", "naïve 🙂", "  x = {'a': 1}\n\n\n"):
        ids = model.tokenizer.encode(text)
        assert list(ids) == reference(text)["input_ids"]
        assert model.tokenizer.decode(ids) == text
    if model.template is not None:
        mine = encode(ChatInput((ChatMessage("user", "Sort a list."),)), model.tokenizer, model.template, 4096)
        chat = [{"role": "user", "content": "Sort a list."}]
        assert list(mine) == reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def test_the_front_end_loads_neither_torch_nor_grpc() -> None:
    code = (
        "import sys; import photon_grpc.frontend.frontend; "
        "print([m for m in ('torch', 'triton', 'transformers', 'grpc', 'google.protobuf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
