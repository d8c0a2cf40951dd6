"""Keys of config.json that are null: each gives the numbers that transformers takes then, or is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from photon_grpc.config.families import FAMILIES
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.model_json import ConfigJson
from photon_grpc.config.rope import RopeJson
from photon_grpc.errors import ModelLoadError
from tests.config.test_model_dir import LLAMA3, YARN, without_revision

KEYS = [field.encode_name for field in msgspec.structs.fields(ConfigJson)]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: What the code of transformers takes null for: nothing of the kind, or what other keys say.
NONE_IS_MEANT = {
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "rope_scaling", "scoring_func"),
    *("sliding_window", "q_lora_rank", "head_dim", "attn_logit_softcapping", "final_logit_softcapping"),
    *("use_bidirectional_attention", "mlp_only_layers"),
}
#: Of the group-limited choice of experts, which DeepSeek-V2 has not where it is read.
OF_GROUPS = {"n_group", "topk_group"}
LONG = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 4.0, "attention_factor": 1.5}
ROPES: list[tuple[str, Any, dict[str, Any]]] = [
    ("LlamaForCausalLM", LlamaRotaryEmbedding, {"rope_type": "default"}),
    ("LlamaForCausalLM", LlamaRotaryEmbedding, {"rope_type": "linear", "factor": 2.0}),
    ("LlamaForCausalLM", LlamaRotaryEmbedding, LLAMA3 | {"original_max_position_embeddings": 64}),
    ("Phi3ForCausalLM", Phi3RotaryEmbedding, {"rope_type": "longrope"} | LONG),
    ("DeepseekV3ForCausalLM", DeepseekV3RotaryEmbedding, {"rope_type": "yarn", "factor": 4.0} | YARN),
]


def ours(path: Path, architecture: str, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return what is read of a config.json; None if it is refused, by the name of a key."""
    values = {"text_config": values} if FAMILIES[architecture].has_text_config else values
    (path / "config.json").write_text(json.dumps(values | {"architectures": [architecture]}))
    try:
        return without_revision(read_model_dir(path))
    except ModelLoadError as refused:
        assert refused.field
        return None


def theirs(architecture: str, values: dict[str, Any]) -> Any:
    """Return transformers' config object; None if there is none."""
    family = FAMILIES[architecture]
    kind, values = CONFIG_MAPPING[family.model_type], copy.deepcopy(values)
    try:
        return kind.from_dict({"text_config": values}).text_config if family.has_text_config else kind.from_dict(values)
    except Exception:
        return None


def sizes_of(architecture: str) -> dict[str, Any]:
    return SIZES | ({"num_experts_per_tok": 2} if FAMILIES[architecture].experts else {})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_key_that_is_null_is_read_as_transformers_reads_it_or_refused(tmp_path: Path, architecture: str) -> None:
    sizes = sizes_of(architecture)
    plain, known = ours(tmp_path, architecture, sizes), theirs(architecture, sizes).to_dict().keys()
    assert plain
    read = set()
    for key in KEYS:
        found, config = ours(tmp_path, architecture, sizes | {key: None}), theirs(architecture, sizes | {key: None})
        if found is None:
            continue
        read.add(key)
        assert config is not None, key
        if key not in known:
            assert found == plain, key
            continue
        is_meant = key in NONE_IS_MEANT or (key in OF_GROUPS and architecture == "DeepseekV2ForCausalLM")
        assert getattr(config, key) is not None or is_meant, key
        assert found == ours(tmp_path, architecture, config.to_dict()), key
    # Written by many tools.
    assert read >= {"rope_scaling", "rope_parameters", "quantization_config", "eos_token_id", "layer_types"}


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("LlamaForCausalLM", ("num_experts", "n_shared_experts", "kv_lora_rank", "topk_method", "moe_layer_freq")),
        ("LlamaForCausalLM", ("partial_rotary_factor", "use_sliding_window", "sliding_window_pattern")),
        ("MistralForCausalLM", ("max_window_layers", "query_pre_attn_scalar", "attention_bias", "mlp_bias")),
        ("Qwen3MoeForCausalLM", ("n_routed_experts", "v_head_dim", "rope_local_base_freq")),
        ("DeepseekV3ForCausalLM", ("num_experts", "decoder_sparse_step", "no_rope_layer_interval")),
    ],
)
def test_a_key_that_is_null_and_that_a_family_does_not_read_changes_nothing(
    tmp_path: Path, architecture: str, keys: tuple[str, ...]
) -> None:
    sizes = sizes_of(architecture)
    assert ours(tmp_path, architecture, sizes | dict.fromkeys(keys)) == ours(tmp_path, architecture, sizes) is not None


@pytest.mark.parametrize(("architecture", "embedding", "rope"), ROPES)
def test_a_parameter_of_rotary_embedding_that_is_null_is_read_as_transformers_reads_it_or_refused(
    tmp_path: Path, architecture: str, embedding: Any, rope: dict[str, Any]
) -> None:
    whole = rope | {"rope_theta": 5e4}
    sizes = SIZES | ({"original_max_position_embeddings": 64} if "short_factor" in rope else {})

    def frequencies(parameters: dict[str, Any]) -> Any:
        try:
            found = embedding(theirs(architecture, sizes | {"rope_parameters": parameters}))
        except Exception:
            return None
        return found.inv_freq.tolist(), found.attention_scaling

    assert ours(tmp_path, architecture, sizes | {"rope_parameters": whole}) and frequencies(whole)
    for key in (field.encode_name for field in msgspec.structs.fields(RopeJson)):
        null, missing = whole | {key: None}, {name: value for name, value in whole.items() if name != key}
        found = ours(tmp_path, architecture, sizes | {"rope_parameters": null})
        if found is not None:
            assert frequencies(null) is not None, key
            same = next(each for each in (missing, whole) if frequencies(each) == frequencies(null))
            assert found == ours(tmp_path, architecture, sizes | {"rope_parameters": same}), key
