"""Families of different layers: what their config.json says is read as transformers reads it, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from photon_grpc.config.families import FAMILIES
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.rope import RopeSpec
from photon_grpc.errors import ModelLoadError

CONFIGS = {
    "MistralForCausalLM": transformers.MistralConfig,
    "MixtralForCausalLM": transformers.MixtralConfig,
    "Phi3ForCausalLM": transformers.Phi3Config,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig,
    "SmolLM3ForCausalLM": transformers.SmolLM3Config,
    "Olmo2ForCausalLM": transformers.Olmo2Config,
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
}
SHORT, LONG = [1.0 + i / 10 for i in range(48)], [2.0 + i for i in range(48)]
#: As microsoft/Phi-4-mini-instruct has it, written by transformers 4.
PHI4_MINI = {
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}
#: As google/gemma-3-1b-it has it, written by transformers 4.
GEMMA3_1B = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def read(path: Path, architecture: str, keys: dict[str, Any]) -> ModelConfig:
    """Read a config.json of transformers' defaults with `keys`."""
    written = json.loads(CONFIGS[architecture]().to_json_string(use_diff=False))
    return read_raw(path, written | {"architectures": [architecture]} | keys)


def read_raw(path: Path, values: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(values))
    return read_model_dir(path)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_what_transformers_writes_and_what_it_takes_for_missing_keys_are_read_alike(
    tmp_path: Path, architecture: str
) -> None:
    theirs = CONFIGS[architecture]()
    least = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    least += ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    found = read(tmp_path, architecture, {})
    bare = read_raw(tmp_path, {"architectures": [architecture]} | {key: getattr(theirs, key) for key in least})
    for card in (found, bare):
        assert card.num_kv_heads == theirs.num_key_value_heads
        assert card.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
        assert card.rms_norm_eps == theirs.rms_norm_eps
        assert card.tie_word_embeddings == theirs.tie_word_embeddings
        assert card.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert (found.ropes, found.windows, found.attention_scale) == (bare.ropes, bare.windows, bare.attention_scale)
    named = theirs.rope_parameters
    by_type = named.values() if "full_attention" in named else [named]
    assert {spec.theta for spec in found.ropes if spec} == {each["rope_theta"] for each in by_type}


def test_every_family_of_this_file_is_served() -> None:
    assert CONFIGS.keys() <= FAMILIES.keys()


def test_phi_4_mini(tmp_path: Path) -> None:
    keys = PHI4_MINI | {"rope_parameters": None}
    found = read(tmp_path, "Phi3ForCausalLM", keys)
    theirs = transformers.Phi3Config(**PHI4_MINI).rope_parameters
    assert (theirs["rope_type"], theirs["partial_rotary_factor"]) == ("longrope", 0.75)
    (spec,) = set(found.ropes)
    assert spec is not None
    assert (spec.kind, spec.original_max_position_embeddings, spec.rotated(128)) == ("longrope", 4096, 96)
    # sqrt(1 + ln(131,072 / 4,096) / ln(4,096))
    assert spec.attention_factor == pytest.approx(1.1902380714238083)
    assert found.windows == (262144,) * 32
    # As transformers 5 writes the same.
    assert read(tmp_path, "Phi3ForCausalLM", keys | {"rope_parameters": theirs, "rope_scaling": None}).ropes == (
        found.ropes
    )
    for name in ("su", "yarn"):
        of_before = keys | {"rope_scaling": PHI4_MINI["rope_scaling"] | {"type": name}}  # type: ignore[operator]
        assert read(tmp_path, "Phi3ForCausalLM", of_before).ropes == found.ropes


def test_gemma_3_1b(tmp_path: Path) -> None:
    found = read_raw(tmp_path, GEMMA3_1B | {"architectures": ["Gemma3ForCausalLM"]})
    assert found.tie_word_embeddings
    assert (found.head_dim, found.attention_scale) == (256, 1 / 16)
    assert found.windows == (512, 512, 512, 512, 512, 0) * 4 + (512, 512)
    full, local = RopeSpec(1e6), RopeSpec(1e4)
    assert found.ropes == (local, local, local, local, local, full) * 4 + (local, local)
    scaled = GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    four_b = read_raw(tmp_path, scaled | {"architectures": ["Gemma3ForCausalLM"]})
    assert set(four_b.ropes) == {local, RopeSpec(1e6, "linear", 8.0)}
    # As transformers 5 writes the same.
    theirs = transformers.Gemma3TextConfig(**scaled)
    for card, keys in ((found, GEMMA3_1B), (four_b, scaled)):
        theirs = transformers.Gemma3TextConfig(**json.loads(json.dumps(keys)))
        written = json.loads(theirs.to_json_string()) | {"architectures": ["Gemma3ForCausalLM"]}
        again = read_raw(tmp_path, written)
        assert (again.ropes, again.windows, again.attention_scale) == (card.ropes, card.windows, card.attention_scale)


def test_smollm3_names_its_layers_without_rotary_embedding(tmp_path: Path) -> None:
    found = read(tmp_path, "SmolLM3ForCausalLM", {})
    theirs = transformers.SmolLM3Config()
    assert [int(spec is not None) for spec in found.ropes] == theirs.no_rope_layers
    keys = {"num_hidden_layers": 3, "no_rope_layers": [0, 1, 0], "layer_types": None}
    slides = {"use_sliding_window": True, "sliding_window": 7}
    for more, windows in (({}, (0, 0, 0)), (slides, (7, 0, 7))):
        card = read(tmp_path, "SmolLM3ForCausalLM", keys | more)
        assert [spec is not None for spec in card.ropes] == [False, True, False]
        assert card.windows == windows


@pytest.mark.parametrize(("window", "expected"), [(None, 0), (5, 5)])
@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Phi3ForCausalLM"])
def test_a_number_is_the_window_of_every_layer(
    tmp_path: Path, architecture: str, window: int | None, expected: int
) -> None:
    assert set(read(tmp_path, architecture, {"sliding_window": window}).windows) == {expected}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ("Gemma3ForCausalLM", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; only gelu_pytorch_tanh"),
    ("Gemma3ForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only gelu_pytorch_tanh"),
    ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ("Gemma3ForCausalLM", {"sliding_window": None}, "layer_types names sliding_attention, but there is no window"),
    ("Gemma3ForCausalLM", {"sliding_window": None, "layer_types": None}, "sliding_window must be at least 1, is None"),
    ("Gemma3ForCausalLM", {"sliding_window": 0}, "sliding_window must be at least 1, is 0"),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "is not the name of a type of layers",
    ),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
        "rope_parameters.full_attention.factor is missing",
    ),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": {"sliding_attention": {"rope_theta": "high"}}},
        "rope_parameters.sliding_attention.rope_theta is 'high'",
    ),
    ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": 7}}, "rope_parameters.full_attention is 7"),
    ("Gemma3ForCausalLM", {"mlp_bias": True}, "mlp_bias is true; gemma3_text has no such biases"),
    ("MistralForCausalLM", {"attention_bias": True}, "attention_bias is true; mistral has no such biases"),
    ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window must be at least 1, is 0"),
    (
        "MistralForCausalLM",
        {"sliding_window": 8, "layer_types": ["full_attention"] * 32},
        "layer_types says that some layers have a window; mistral has one in all layers or in none",
    ),
    ("MistralForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
    ("MistralForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("Phi3ForCausalLM", {"partial_rotary_factor": 0.1, "rope_parameters": None}, "0.1 of head_dim 96 is 9"),
    ("Phi3ForCausalLM", {"partial_rotary_factor": 0.0, "rope_parameters": None}, "0 of head_dim 96 is 0"),
    (
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": SHORT}},
        "rope_parameters.long_factor is missing",
    ),
    (
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": SHORT[1:], "long_factor": LONG}},
        "short_factor must have 48 numbers, one for each rotated pair of a head, has 47",
    ),
    (
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": ["1"], "long_factor": LONG}},
        "rope_parameters.short_factor[0] is '1'",
    ),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers must have a number for each of the 36 layers"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [2] * 36}, "no_rope_layers[0] is 2"),
    ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    ("Olmo2ForCausalLM", {"hidden_act": "relu"}, "hidden_act is 'relu'; only silu"),
    ("Olmo2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window is true; olmo2 has no sliding windows"),
    ("Olmo2ForCausalLM", {"mlp_bias": True}, "mlp_bias is true; olmo2 has no such biases"),
]


@pytest.mark.parametrize(("architecture", "keys", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, architecture: str, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, architecture, keys)
    assert str(caught.value).startswith("config.json: ")
    assert said in str(caught.value)
    assert caught.value.field
