"""The keys of config.json about latent attention: read as transformers reads them, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from photon_grpc.config.experts import ExpertSpec
from photon_grpc.config.flags import ModelFlags
from photon_grpc.config.latent import LatentSpec
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.weight_bytes import refuse_without_room
from photon_grpc.errors import ModelLoadError

#: As deepseek-ai/DeepSeek-V2-Lite has it.
LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


def read(path: Path, values: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(values))
    return read_model_dir(path)


def test_the_published_file_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, LITE)
    assert found.latent == LatentSpec(512, 0, 128, 64, 128)
    layers = (False, *(True,) * 26)
    assert found.experts == ExpertSpec(64, 6, 1408, "softmax", renormalises=False, layers=layers, shared_size=2816)
    (rope,) = set(found.ropes)
    assert rope is not None
    # 0.1 · 0.707 · ln 40 + 1 = 1.2608
    assert found.attention_scale == pytest.approx(192**-0.5 * 1.2608037774**2)
    assert (rope.kind, rope.attention_factor, rope.original_max_position_embeddings) == ("yarn", 1.0, 4096)


def test_what_transformers_takes_for_missing_keys(tmp_path: Path) -> None:
    theirs = transformers.DeepseekV2Config()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    found = read(
        tmp_path,
        {key: getattr(theirs, key) for key in sizes}
        | {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 4},
    )
    sizes_of = theirs.kv_lora_rank, theirs.q_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim
    assert found.latent == LatentSpec(*sizes_of, theirs.v_head_dim)
    assert found.experts is not None
    assert (found.experts.num_experts, found.experts.intermediate_size) == (64, theirs.moe_intermediate_size)
    assert found.experts.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"topk_method": "group_limited_greedy"}, "topk_method is 'group_limited_greedy'; only greedy is supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob is true, which is not supported for this architecture"),
        ({"v_head_dim": None}, "v_head_dim is null: expected int, got null"),
        ({"kv_lora_rank": None}, "kv_lora_rank is null: expected int, got null"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, is 63"),
        ({"rope_interleave": False}, "rope_interleave is false; only interleaved pairs are supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        read(tmp_path, LITE | keys)
    assert said in str(refused.value)


#: As deepseek-ai/DeepSeek-V3 has it, without its quantization_config.
V3: dict[str, Any] = LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def test_a_router_with_a_bias_and_groups_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, V3)
    assert found.latent == LatentSpec(512, 1536, 128, 64, 128)
    spec = found.experts
    assert spec is not None and (spec.num_experts, spec.top_k, spec.num_shared) == (256, 8, 1)
    assert (spec.scoring, spec.renormalises, spec.scale) == ("sigmoid", True, 2.5)
    assert (spec.has_bias, spec.groups, spec.groups_taken) == (True, 8, 4)


def test_what_transformers_takes_for_missing_keys_of_v3(tmp_path: Path) -> None:
    theirs = transformers.DeepseekV3Config()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    found = read(
        tmp_path, {key: getattr(theirs, key) for key in sizes} | {"architectures": ["DeepseekV3ForCausalLM"]}
    ).experts
    assert found is not None
    assert (found.groups, found.groups_taken, found.top_k) == (theirs.n_group, theirs.topk_group, 8)
    assert (found.scale, found.renormalises, found.num_shared) == (theirs.routed_scaling_factor, True, 1)
    assert found.layers.index(True) == theirs.first_k_dense_replace


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"n_group": 7}, "n_group is 7; 256 experts are not that many groups of at least two"),
        ({"topk_group": 9}, "topk_group, num_experts_per_tok are 9 and 8; of 8 groups each has 32 experts"),
        ({"n_group": 64, "topk_group": 1}, "num_experts_per_tok are 1 and 8; of 64 groups each has 4 experts"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only sigmoid is supported for this architecture"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; only noaux_tc is supported for this architecture"),
    ],
)
def test_what_is_not_computed_of_v3_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        read(tmp_path, V3 | keys)
    assert said in str(refused.value)


def test_weights_that_a_gpu_has_no_room_for_are_refused_with_their_bytes(tmp_path: Path) -> None:
    model = read(tmp_path, V3)
    with pytest.raises(ModelLoadError) as refused:
        refuse_without_room(model, ModelFlags(), 141 * 10**9, 1)
    # 671 billion parameters of two bytes, but for what expands latents and for norms.
    assert refused.value.needed == pytest.approx(1.342e12, rel=0.01)
    assert "the weights need 1,3" in str(refused.value) and "which has room for 141.0 GB" in str(refused.value)
    refuse_without_room(model, ModelFlags(), 141 * 10**9, 16)
    refuse_without_room(read(tmp_path, LITE), ModelFlags(), 32 * 10**9, 1)


def test_weights_are_counted_in_the_type_that_they_are_computed_in(tmp_path: Path) -> None:
    model = read(tmp_path, LITE | {"dtype": "float32"})
    with pytest.raises(ModelLoadError):
        refuse_without_room(model, ModelFlags(), 48 * 10**9, 1)
    refuse_without_room(model, ModelFlags(dtype="bfloat16"), 48 * 10**9, 1)
    with pytest.raises(ModelLoadError):
        refuse_without_room(read(tmp_path, LITE), ModelFlags(dtype="float32"), 48 * 10**9, 1)
