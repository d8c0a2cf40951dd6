"""The contents of a model directory in every spelling; any other content is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.config import checkpoint
from photon_grpc.config.families import FAMILIES
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.model_json import ArchitectureJson, ConfigJson, GenerationDefaults, TokenizerJson
from photon_grpc.config.rope import RopeJson, RopeSpec
from photon_grpc.errors import ModelLoadError
from tests.examples import examples

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"short_factor": [1.0], "long_factor": [2.0], "attention_factor": 1.0}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": [2, 3],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": LLAMA3 | {"rope_theta": 500000.0},
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


def write(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a directory with that config.json, and `files` (name without .json -> object)."""
    path.mkdir(exist_ok=True)
    for name, value in ({"config": CONFIG if config is None else config} | files).items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def changed(**keys: Any) -> dict[str, Any]:
    """CONFIG with those keys; None removes one."""
    return {key: value for key, value in (CONFIG | keys).items() if value is not None}


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_model_dir(path)
    return str(caught.value)


def without_revision(found: ModelConfig) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"revision": None, "path": None}


def test_every_number_is_read(tmp_path: Path) -> None:
    found = read_model_dir(write(tmp_path))
    assert (found.architecture, found.model_type) == ("LlamaForCausalLM", "llama")
    assert (found.hidden_size, found.intermediate_size, found.num_layers, found.vocab_size) == (2048, 8192, 16, 128256)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (32, 8, 64)
    assert (found.rms_norm_eps, found.max_position_embeddings, found.dtype) == (1e-5, 131072, "bfloat16")
    assert found.ropes == (RopeSpec(500000.0, "llama3", 32.0, 1.0, 4.0, 8192),) * 16
    assert (found.tie_word_embeddings, found.qkv_bias, found.output_bias, found.mlp_bias, found.qk_norm) == (
        True,
        *[False] * 4,
    )
    assert (found.bos_token_id, found.eos_token_ids) == (1, (2, 3))
    assert (found.has_tokenizer, found.chat_template, found.special_tokens) == (False, None, ())


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_spelling_of_transformers_4_is_the_same_card(tmp_path: Path, type_key: str) -> None:
    scaling = {type_key if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    old = changed(dtype=None, torch_dtype="bfloat16", rope_parameters=None, rope_theta=500000.0, rope_scaling=scaling)
    cards = read_model_dir(write(tmp_path / "old", old)), read_model_dir(write(tmp_path / "new"))
    assert without_revision(cards[0]) == without_revision(cards[1])


def test_the_same_scaling_may_stand_in_both_spellings(tmp_path: Path) -> None:
    both = read_model_dir(write(tmp_path / "both", changed(rope_scaling=LLAMA3)))
    assert without_revision(both) == without_revision(read_model_dir(write(tmp_path / "one")))
    read_model_dir(write(tmp_path / "empty", changed(rope_scaling={})))


@pytest.mark.parametrize("prefix", ["Llama", "Qwen2", "Qwen3"])
def test_defaults_written_by_transformers_are_read_as_it_reads_them(tmp_path: Path, prefix: str) -> None:
    config = getattr(transformers, prefix + "Config")(architectures=[prefix + "ForCausalLM"])
    config.save_pretrained(tmp_path)
    found = read_model_dir(tmp_path)
    assert found.hidden_size == config.hidden_size
    assert found.num_kv_heads == config.num_key_value_heads
    assert found.head_dim == getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    assert found.ropes[0].theta == config.rope_parameters["rope_theta"]
    assert found.rms_norm_eps == config.rms_norm_eps
    assert found.tie_word_embeddings == config.tie_word_embeddings
    assert (found.qkv_bias, found.qk_norm) == (prefix == "Qwen2", prefix == "Qwen3")


def test_the_fewest_keys_that_a_config_needs(tmp_path: Path) -> None:
    required = (
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    )
    least = {"model_type": "llama"} | {key: CONFIG[key] for key in required}
    found = read_model_dir(write(tmp_path, least))
    theirs = transformers.LlamaConfig(**least)
    assert (found.num_kv_heads, found.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (found.rms_norm_eps, found.ropes[0].theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert (found.tie_word_embeddings, found.dtype) == (theirs.tie_word_embeddings, "float32")
    for key in required:
        assert (
            refusal(write(tmp_path, {k: v for k, v in least.items() if k != key})) == f"config.json: {key} is missing"
        )


def safetensors_file(path: Path, **tensors: tuple[str, int]) -> None:
    """Write a file of vectors, name -> (dtype, elements)."""
    header, position = {}, 0
    for name, (dtype, size) in tensors.items():
        end = position + size * {"F32": 4, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}.get(dtype, 2)
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(position))


def test_an_unset_dtype_is_that_of_most_weight_bytes(tmp_path: Path) -> None:
    write(tmp_path, changed(dtype=None))
    assert read_model_dir(tmp_path).dtype == "float32"
    safetensors_file(tmp_path / "model.safetensors", norm=("F32", 10), weight=("BF16", 100))
    assert read_model_dir(tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize("quantized", ["I32", "I8", "U8", "F8_E4M3"])
def test_an_unset_dtype_of_a_quantized_checkpoint_is_that_of_its_float_tensors(tmp_path: Path, quantized: str) -> None:
    write(tmp_path, changed(dtype=None))
    safetensors_file(tmp_path / "model.safetensors", qweight=(quantized, 400), scales=("F16", 20), norm=("BF16", 10))
    assert read_model_dir(tmp_path).dtype == "float16"
    write(tmp_path, changed(dtype="bfloat16"))
    assert read_model_dir(tmp_path).dtype == "bfloat16"


def test_revision_tells_models_apart_and_nothing_else(tmp_path: Path) -> None:
    def revision(name: str, config: dict[str, Any], size: int) -> str:
        write(tmp_path / name, config)
        safetensors_file(tmp_path / name / "model.safetensors", weight=("BF16", size))
        return read_model_dir(tmp_path / name).revision

    first = revision("a", CONFIG, 8)
    assert revision("b", CONFIG, 8) == first
    assert revision("c", changed(rms_norm_eps=1e-6), 8) != first
    assert revision("d", CONFIG, 9) != first


def test_a_process_without_numpy_reads_no_header_when_the_dtype_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "safe_open", None)  # it imports numpy
    write(tmp_path)
    safetensors_file(tmp_path / "model.safetensors", weight=("BF16", 8))
    named = read_model_dir(tmp_path)
    monkeypatch.undo()
    write(tmp_path, changed(dtype=None))
    assert read_model_dir(tmp_path).dtype == named.dtype == "bfloat16"


def test_generation_config_comes_first(tmp_path: Path) -> None:
    generation = {"bos_token_id": 5, "eos_token_id": 7, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    found = read_model_dir(
        write(tmp_path, generation_config=generation | {"do_sample": True, "repetition_penalty": 1.1})
    )
    assert (found.bos_token_id, found.eos_token_ids) == (5, (7,))
    expected = generation | {"do_sample": True, "repetition_penalty": 1.1, "bos_token_id": 5, "eos_token_id": 7}
    assert msgspec.structs.asdict(found.generation) == expected


@pytest.mark.parametrize(
    ("generation", "temperature"),
    [
        ({}, None),
        ({"do_sample": True}, None),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": False}, 0.0),
    ],
)
def test_do_sample_false_is_temperature_zero(
    tmp_path: Path, generation: dict[str, Any], temperature: float | None
) -> None:
    found = read_model_dir(write(tmp_path, generation_config=generation))
    assert found.generation.temperature == temperature
    assert found.eos_token_ids == (2, 3)


def test_template_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
        "chat_template": "one",
    }
    found = read_model_dir(write(tmp_path, tokenizer_config=tokenizer, tokenizer={}))
    assert found.special_tokens == (("bos_token", "<s>"), ("eos_token", "</s>"))
    assert (found.chat_template, found.has_tokenizer) == ("one", True)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    assert read_model_dir(write(tmp_path, tokenizer_config={"chat_template": named})).chat_template == "two"
    assert read_model_dir(write(tmp_path, tokenizer_config={"chat_template": named[:1]})).chat_template is None
    (tmp_path / "chat_template.jinja").write_text("three — é", encoding="utf-8")
    assert read_model_dir(tmp_path).chat_template == "three — é"


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["GPT2LMHeadModel"]},
        "'GPT2LMHeadModel', which is not supported; supported: " + ", ".join(FAMILIES),
    ),
    ({"architectures": None, "model_type": "mamba"}, "architectures names 'mamba'"),
    ({"architectures": []}, "architectures is list: expected array of length >= 1"),
    ({"architectures": [7]}, "architectures[0] is 7: expected str, got int"),
    ({"hidden_size": "2048"}, "hidden_size is '2048': expected int, got str"),
    ({"hidden_size": True}, "hidden_size is True: expected int, got bool"),
    ({"hidden_size": -2048}, "hidden_size is -2048: expected int >= 1"),
    ({"hidden_size": 2050, "head_dim": None}, "hidden_size 2050 is not divisible by num_attention_heads 32"),
    ({"vocab_size": 10**30}, f"vocab_size is {10**30}: expected int <= 16777216"),
    ({"vocab_size": 128256.0}, "vocab_size is 128256.0: expected int, got float"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0: expected int >= 1"),
    ({"num_key_value_heads": 5}, "num_attention_heads 32 is not divisible by num_key_value_heads 5"),
    ({"num_key_value_heads": 64}, "num_attention_heads 32 is not divisible by num_key_value_heads 64"),
    ({"head_dim": 63}, "head_dim must be even and at most 1024 for rotary embedding, is 63"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small': expected float, got str"),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1: expected float >= 0.0"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': expected bool, got str"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits is missing"),
    ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window is true; llama has no sliding windows"),
    ({"layer_types": ["full_attention"] * 15 + ["linear_attention"]}, "layer_types must be a list of full_attention"),
    ({"layer_types": ["full_attention"] * 15 + ["sliding_attention"]}, "layer_types names sliding_attention, but"),
    ({"layer_types": ["full_attention"] * 17}, "layer_types must name each of the 16 layers once, names 17"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope_parameters.rope_type is 'yarn', which is not supported",
    ),
    ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling differs from rope_parameters"),
    ({"rope_scaling": {"type": "weird", "factor": 2.0}}, "rope_scaling.type is 'weird', which is not supported"),
    ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor must be above low_freq_factor"),
    ({"rope_parameters": LLAMA3 | {"factor": 0}}, "rope_parameters.factor is 0: expected float >= 1e-06"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention holds"),
    ({"rope_parameters": [1]}, "rope_parameters is list: expected object | null, got array"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, below 1"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
    ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16, is 'float64'"),
    ({"dtype": None, "torch_dtype": 16}, "torch_dtype is 16: expected str | null, got int"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>': expected int | array | null, got str"),
    ({"eos_token_id": [2, 128256]}, "eos_token_id must be between 0 and 128255"),
    ({"bos_token_id": -1}, "bos_token_id must be between"),
    ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
    ({"max_position_embeddings": 1}, "max_position_embeddings is 1: expected int >= 2"),
    (
        {"head_dim": None, "num_attention_heads": 1, "num_key_value_heads": 1},
        "at most 1024 for rotary embedding, is 2048",
    ),
    ({"layer_types": [["full_attention"]]}, "layer_types[0] is list: expected str, got array"),
]


@pytest.mark.parametrize(
    ("keys", "said"), REFUSED, ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else ""
)
def test_refusals_name_file_key_and_value(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    message = refusal(write(tmp_path, changed(**keys)))
    assert message.startswith("config.json: ")
    assert said in message


@pytest.mark.parametrize(
    "keys", [{"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"eos_token_id": 10**9}, {"do_sample": "no"}]
)
def test_generation_config_is_checked_too(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert refusal(write(tmp_path, generation_config=keys)).startswith(f"generation_config.json: {next(iter(keys))} ")


EVERY_ROPE_KEY = {"rope_theta": 500000.0, "type": "llama3", "partial_rotary_factor": 1.0}
#: One directory in which every key that is ever read is written, twice where there are two spellings of it.
EVERY_KEY: dict[str, dict[str, Any]] = {
    "config": CONFIG
    | {
        "torch_dtype": "float16",
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "layer_types": ["full_attention"] * 16,
        "original_max_position_embeddings": 8192,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "no_rope_layers": [1] * 16,
        "no_rope_layer_interval": 4,
        "sliding_window_pattern": 6,
        "hidden_activation": "silu",
        "query_pre_attn_scalar": 64.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "num_experts": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [3],
        "scoring_func": "softmax",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.5,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_parameters": LLAMA3 | LONG | YARN | EVERY_ROPE_KEY,
        "rope_scaling": LLAMA3 | LONG | YARN | EVERY_ROPE_KEY,
    },
    "generation_config": {
        "bos_token_id": 1,
        "eos_token_id": [2],
        "do_sample": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    },
    "tokenizer_config": {
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "pad_token": {"content": "<p>"},
        "unk_token": "<u>",
    },
}
#: Keys that more than one type may stand under.
MAY_BE: dict[str, tuple[type, ...]] = {
    "bos_token_id": (int, list),
    "eos_token_id": (int, list),
    "chat_template": (str, list),
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), (str, dict)),
}
ONE_OF_EACH_TYPE = (True, 7, 1.5, "a", ["a"], [None], [[]], {"a": {}}, {"content": 1})


def paths_of(values: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key, and those within objects of parameters."""
    found = [(*path, key) for key in values]
    for key in {"rope_parameters", "rope_scaling"} & values.keys():
        found += paths_of(values[key], (*path, key))
    return found


def is_right(key: str, value: object, good: object) -> bool:
    """Return whether the type of `value` is one that `key` may have."""
    if key == "quantization_config" or isinstance(good, float):
        return isinstance(good, float) and type(value) in (int, float)
    if type(value) is list or type(value) is dict:
        # What is within is wrong, but for an object of parameters, whose own keys are in the table.
        return type(value) is dict is type(good) and key not in MAY_BE
    return type(value) in MAY_BE.get(key, (type(good),))


@pytest.mark.parametrize("file", EVERY_KEY)
def test_a_known_key_of_a_wrong_type_is_refused_wherever_it_stands(tmp_path: Path, file: str) -> None:
    (write(tmp_path, **EVERY_KEY) / "chat_template.jinja").write_text("{{ messages }}")
    assert read_model_dir(tmp_path).eos_token_ids == (2,)
    for *path, key in paths_of(EVERY_KEY[file]):
        changed = json.loads(json.dumps(EVERY_KEY))
        fields = changed[file]
        for part in path:
            fields = fields[part]
        good = fields[key]
        for value in ONE_OF_EACH_TYPE:
            if not is_right(key, value, good):
                fields[key] = value
                write(tmp_path, **changed)
                said = refusal(tmp_path)
                assert said.startswith(f"{file}.json: ") and key in said, (path, key, value, said)


def test_the_directory_with_every_key_has_every_key_that_is_read() -> None:
    def keys(*kinds: type[msgspec.Struct]) -> set[str]:
        return {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}

    config = EVERY_KEY["config"]
    assert keys(ArchitectureJson, ConfigJson) == config.keys()
    assert keys(RopeJson) == config["rope_parameters"].keys() == config["rope_scaling"].keys()
    assert keys(GenerationDefaults) == EVERY_KEY["generation_config"].keys()
    assert keys(TokenizerJson) == EVERY_KEY["tokenizer_config"].keys()


def test_an_unused_sliding_window_is_no_reason_to_refuse(tmp_path: Path) -> None:
    read_model_dir(write(tmp_path, changed(use_sliding_window=False, sliding_window=4096, max_window_layers=2)))
    read_model_dir(write(tmp_path, changed(layer_types=["full_attention"] * 16)))


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True},
        {"use_sliding_window": False, "max_window_layers": 1},
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
)
def test_windows_are_those_of_transformers(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    config = getattr(transformers, family + "Config")(num_hidden_layers=3, sliding_window=20, **keys)
    expected = tuple(20 if kind == "sliding_attention" else 0 for kind in config.layer_types)
    written = json.loads(config.to_json_string()) | {"architectures": [family + "ForCausalLM"]}
    assert read_model_dir(write(tmp_path, written)).windows == expected
    # As written before layer_types was.
    if "layer_types" not in keys:
        del written["layer_types"]
        written |= {"sliding_window": 20, "use_sliding_window": keys["use_sliding_window"]}
        assert read_model_dir(write(tmp_path, written)).windows == expected


def test_code_of_the_directory_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "evil.py").write_text("raise SystemExit(3)")
    read_model_dir(write(tmp_path / "model", changed(auto_map={"AutoConfig": "evil.Config"})))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{", b'{"a": NaN}', b"\xff\xfe{}", b"[" * 200_000, b'{"a":' * 200_000]
)
def test_a_config_that_is_not_an_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith("config.json: ")
    assert len(message) < 300


def test_missing_and_irregular_files_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "config.json: there is no such file" in refusal(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "config.json: is a directory" in refusal(tmp_path)
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")  # opening it would wait forever
    assert "config.json: is a pipe or a device" in refusal(tmp_path)


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (2**20 + 1))
    assert "chat_template.jinja: exceeds the limit of 1048576 bytes" in refusal(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*CONFIG, *LLAMA3, "type", "content"]), inner, max_size=4)
    ),
    max_leaves=8,
)
READ_KEYS = [
    *CONFIG,
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    "layer_types",
    "partial_rotary_factor",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
]


@settings(max_examples=examples(200))
@given(keys=st.dictionaries(st.sampled_from(READ_KEYS), JSON, max_size=3), tokenizer=JSON, generation=JSON)
def test_any_json_gives_a_valid_config_or_a_short_error(
    tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Any], tokenizer: Any, generation: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    write(path, CONFIG | keys, tokenizer_config=tokenizer, generation_config=generation)
    found, message = None, ""
    try:
        found = read_model_dir(path)
    except ModelLoadError as error:
        message = str(error)
    assert len(message) < 500
    if found is None:
        return
    numbers = [value for value in dataclasses.asdict(found).values() if isinstance(value, int)]
    assert all(value >= 0 for value in numbers)
    assert found.num_heads % found.num_kv_heads == 0
    assert all(0 <= token < found.vocab_size for token in found.eos_token_ids)


@settings(max_examples=examples(100))
@given(content=st.binary(max_size=64))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes(content)
    assert refusal(path).startswith("config.json: ")


def test_a_card_crosses_processes_as_json(tmp_path: Path) -> None:
    found = read_model_dir(write(tmp_path))
    encoded = msgspec.json.encode(found, enc_hook=str)
    assert msgspec.json.decode(encoded, type=ModelConfig, dec_hook=lambda kind, value: kind(value)) == found


@pytest.mark.parametrize("given", [{}, {"sliding_window": None}, {"sliding_window": 7}])
def test_an_unset_window_is_that_of_transformers(tmp_path: Path, given: dict[str, Any]) -> None:
    config = transformers.Qwen2Config(num_hidden_layers=3, use_sliding_window=True, max_window_layers=1, **given)
    written = config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    for key in ("sliding_window", "layer_types"):
        del written[key]
    expected = tuple((config.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in config.layer_types)
    assert read_model_dir(write(tmp_path, written | given)).windows == expected


def test_a_window_of_no_token_is_refused(tmp_path: Path) -> None:
    written = transformers.Qwen2Config(num_hidden_layers=3).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    del written["layer_types"]
    with pytest.raises(ModelLoadError, match="sliding_window must be at least 1"):
        read_model_dir(write(tmp_path, written | {"use_sliding_window": True, "sliding_window": 0}))
