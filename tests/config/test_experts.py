"""The keys of config.json about experts: read as transformers reads them, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from photon_grpc.cli import doctor
from photon_grpc.config.experts import ExpertSpec
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.weight_bytes import linear_bytes, step_bytes
from photon_grpc.errors import ModelLoadError

CONFIGS = {"Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig, "MixtralForCausalLM": transformers.MixtralConfig}
#: As Qwen/Qwen3-30B-A3B and mistralai/Mixtral-8x7B-v0.1 have them.
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def read(path: Path, values: dict[str, Any]) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(values))
    return read_model_dir(path)


def test_published_files_are_read(tmp_path: Path) -> None:
    found = read(tmp_path, QWEN3_30B)
    assert found.experts == ExpertSpec(128, 8, 768, "softmax", renormalises=True, layers=(True,) * 48)
    assert (found.qk_norm, found.windows) == (True, (0,) * 48)
    assert read(tmp_path, MIXTRAL).experts == ExpertSpec(8, 2, 14336, "softmax", renormalises=True, layers=(True,) * 32)
    assert read(tmp_path, MIXTRAL | {"sliding_window": 4096}).windows == (4096,) * 32


@pytest.mark.parametrize("architecture", CONFIGS)
def test_what_transformers_writes_and_takes_for_missing_keys_are_read_alike(tmp_path: Path, architecture: str) -> None:
    theirs = CONFIGS[architecture]()
    written = json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    bare = {key: getattr(theirs, key) for key in (*sizes, "vocab_size")}
    found = read(tmp_path, written)
    assert found.experts == read(tmp_path, bare | {"architectures": [architecture]}).experts
    assert found.experts is not None
    assert (found.experts.num_experts, found.experts.top_k) == (theirs.num_local_experts, theirs.num_experts_per_tok)


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [(1, [], "11111111"), (1, [0, 7], "01111110"), (2, [], "01010101"), (3, [2], "00000100"), (2, None, "01010101")],
)
def test_which_layers_have_experts(tmp_path: Path, step: int, dense: list[int] | None, expected: str) -> None:
    keys = {"num_hidden_layers": 8, "decoder_sparse_step": step, "mlp_only_layers": dense}
    found = read(tmp_path, QWEN3_30B | keys)
    assert found.experts is not None
    assert found.experts.layers == tuple(layer == "1" for layer in expected)


@pytest.mark.parametrize("keys", [{"num_experts": 0}, {"mlp_only_layers": list(range(48))}])
def test_a_model_without_any_is_dense(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert read(tmp_path, QWEN3_30B | keys).experts is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"scoring_func": "cosine"}, "scoring_func is 'cosine'; only softmax is supported for this architecture"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only softmax is supported for this architecture"),
        ({"capacity_factor": 1.25}, "capacity_factor is 1.25; a capacity of experts is not supported"),
        ({"moe_eval_capacity_token_fraction": 0.5}, "moe_eval_capacity_token_fraction is 0.5; a capacity"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be between 1 and 32 where there are 128 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be between 1 and 32 where there are 128 experts, is 0"),
        ({"num_local_experts": 64}, "num_local_experts is 64, but num_experts is 128"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, is 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1, is 0"),
        ({"num_experts": 4096}, "num_experts"),
        ({"use_sliding_window": True, "sliding_window": 64}, "qwen3_moe has no sliding windows"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        read(tmp_path, QWEN3_30B | keys)
    assert said in str(refused.value)


def test_a_capacity_that_is_null_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3_30B | {"expert_capacity": None}).experts is not None


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_reach(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3_30B)
    assert model.experts is not None
    of_experts = 2 * 3 * 128 * 768 * 2048 * 48
    whole, one, eight = step_bytes(model, 10_000), step_bytes(model, 1), step_bytes(model, 8)
    assert whole == pytest.approx(linear_bytes(model, None))
    assert whole - one == pytest.approx(of_experts * 120 / 128)
    # 51.6 of 128: the chance that none of eight tokens takes one is (15 / 16)^8.
    assert whole - eight == pytest.approx(of_experts * (15 / 16) ** 8)
    assert dict(doctor._experts(model.experts))["experts per step"].startswith("8 / 51.6 / 126 at 1 / 8 / 64 tokens")
