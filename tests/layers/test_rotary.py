"""Rotary tables equal transformers', for every kind and both spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from photon_grpc.config.json_file import as_struct
from photon_grpc.config.rope import RopeKeys, RopeSpec, read_rope
from photon_grpc.kernels import select
from photon_grpc.layers.context import GroupContext, StepContext
from photon_grpc.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.examples import examples

THETA = st.sampled_from([10000.0, 500000.0, 1e6, 75.5])
FACTOR = st.floats(1.0, 64.0)
KINDS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": THETA}),
    st.fixed_dictionaries({"rope_type": st.just("linear"), "rope_theta": THETA, "factor": FACTOR}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "rope_theta": THETA,
            "factor": FACTOR,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(2.5, 8.0),
            "original_max_position_embeddings": st.sampled_from([16, 256, 8192]),
        }
    ),
)


def spelled_for_transformers_4(rope: dict[str, Any], key: str) -> dict[str, Any]:
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type")}
    scaling[key] = rope["rope_type"]
    return {"rope_theta": rope["rope_theta"]} | ({} if rope["rope_type"] == "default" else {"rope_scaling": scaling})


def spec_of(keys: dict[str, Any]) -> RopeSpec:
    return read_rope(as_struct(keys | {"max_position_embeddings": 4096}, RopeKeys, "config.json"))


def theirs(head_dim: int, keys: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(hidden_size=head_dim * 2, num_attention_heads=2, max_position_embeddings=4096, **keys)
    return LlamaRotaryEmbedding(config)


@settings(max_examples=examples(40))
@given(
    rope=KINDS, head_dim=st.sampled_from([16, 20, 64, 80, 128]), spelling=st.sampled_from(["5", "rope_type", "type"])
)
def test_frequencies_equal_transformers(rope: dict[str, Any], head_dim: int, spelling: str) -> None:
    keys = {"rope_parameters": rope} if spelling == "5" else spelled_for_transformers_4(rope, spelling)
    expected = theirs(head_dim, {name: dict(v) if isinstance(v, dict) else v for name, v in keys.items()}).inv_freq
    spec = spec_of(keys)
    torch.testing.assert_close(inverse_frequencies(spec, head_dim, 4096), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("head_dim", [20, 64])
def test_rotation_equals_transformers_up_to_the_last_position(head_dim: int) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    positions = torch.tensor([0, 1, 7, 1000, 4095])
    q, k = torch.randn(5, 4, head_dim), torch.randn(5, 2, head_dim)
    cos, sin = theirs(head_dim, {"rope_parameters": dict(rope)})(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    spec = spec_of({"rope_parameters": rope})
    rotary = RotaryEmbedding(spec, head_dim, 4096, device=torch.device("cpu"), kernels=select("torch", "cpu"))
    empty = torch.empty(0)
    ctx = StepContext(positions, (GroupContext(empty, empty, None),))  # type: ignore[arg-type]
    found_q, found_k = rotary(q.clone(), k.clone(), ctx)
    torch.testing.assert_close(found_q, expected_q[0].transpose(0, 1), atol=2e-5, rtol=0)
    torch.testing.assert_close(found_k, expected_k[0].transpose(0, 1), atol=2e-5, rtol=0)
