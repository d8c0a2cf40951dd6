"""The bytes of a format by a model's sizes, beside those that its loaded weights have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from photon_grpc import demo
from photon_grpc.config.flags import ModelFlags
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import FORMATS, WeightFormat
from photon_grpc.config.weight_bytes import (
    described,
    embedding_bytes,
    kv_token_bytes,
    linear_bytes,
    misfit,
    saving,
    weight_bytes,
)
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import TORCH
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import build, load
from photon_grpc.models.weights import linear_bytes as held_bytes

#: Its q, k and v are one tensor in a checkpoint, and so are gate and up.
PHI3 = {"architecture": "Phi3ForCausalLM", "model_type": "phi3"}
HEAD = replace(FORMATS["int8"], head="int8")


@pytest.fixture(autouse=True)
def row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights as a GPU has them: not packed for this CPU."""
    monkeypatch.setattr("photon_grpc.layers.quantization.weight_only.pack_quantized", lambda weight, bias: None)
    monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)


@pytest.mark.parametrize(
    "form",
    [None, *FORMATS.values(), HEAD, replace(HEAD, embedding="int8")],
    ids=lambda form: form and form.name,
)
def test_bytes_are_those_of_the_loaded_weights(form: WeightFormat | None) -> None:
    config = read_model_dir(demo.TARGET)
    decoder = build(
        config, dtype=torch.float32, device="cpu", kernels=TORCH, max_model_len=16, method=methods(form)
    )  # fmt: skip
    load(decoder, config)
    held, _ = held_bytes(decoder)
    of_embedding = embedding_bytes(config, form) if form is not None and form.embedding else 0
    assert linear_bytes(config, form) + of_embedding == held
    assert kv_token_bytes(config) == sum(layer.attention.kv.format.token_bytes for layer in decoder.layers)


def test_what_a_format_saves_is_said_in_tokens_of_kv_cache() -> None:
    config = replace(read_model_dir(demo.TARGET), dtype="bfloat16")
    said = saving(config, FORMATS["int8"])
    assert said.startswith(f"{linear_bytes(config, FORMATS['int8']) / 1e6:.3g} MB of weights, ")
    less = linear_bytes(config, None) - linear_bytes(config, FORMATS["int8"])
    assert said.endswith(f"less than in bfloat16: room for {less // kv_token_bytes(config):,} more tokens of KV cache")


def test_a_format_that_does_not_suit_a_layer_is_known_by_sizes_alone() -> None:
    config = replace(read_model_dir(demo.TARGET), hidden_size=192)
    flags = ModelFlags(quantization="int4-g128")
    problem = "model.layers.0.self_attn.q_proj: 192 input features are not a multiple of the 128 columns of a group"
    assert misfit(config, FORMATS["int4-g128"]) == problem
    assert described(config, flags) == f"int4-g128: does not suit this model, {problem}"
    assert not misfit(config, FORMATS["int8"])


@pytest.mark.parametrize(
    ("name", "sizes", "refused"),
    [
        ("int4-g128", {"hidden_size": 192}, "model.layers.0.self_attn.q_proj"),
        ("fp8-block", {"hidden_size": 192}, ""),
        ("fp8-block", {"num_kv_heads": 1}, "model.layers.0.self_attn.k_proj"),
        ("fp8-block", {"intermediate_size": 576}, "model.layers.0.mlp.gate_proj"),
        ("fp8-block", {"num_kv_heads": 1, "intermediate_size": 576, **PHI3}, ""),
    ],
)
def test_a_format_does_not_suit_a_model_whose_layer_is_refused_when_it_is_made(
    name: str, sizes: dict[str, object], refused: str
) -> None:
    config, form = replace(read_model_dir(demo.TARGET), **sizes), FORMATS[name]
    said = ""
    try:
        build(config, dtype=torch.float32, device="cpu", kernels=TORCH, max_model_len=16, method=methods(form))
    except ModelLoadError as error:
        said = error.message
    assert misfit(config, form) == said
    assert said.partition(":")[0] == refused


def test_more_tokens_have_room_where_keys_and_values_have_8_bits() -> None:
    config = replace(read_model_dir(demo.TARGET), dtype="bfloat16")
    form, flags = FORMATS["int8"], ModelFlags(quantization="int8", dtype="bfloat16")
    of_16_bits, of_8_bits = (weight_bytes(config, form, kv_dtype) for kv_dtype in ("auto", "fp8"))
    assert of_16_bits[:2] == of_8_bits[:2]
    assert of_8_bits.kv_tokens_gained in (2 * of_16_bits.kv_tokens_gained, 2 * of_16_bits.kv_tokens_gained + 1)
    assert f"room for {of_8_bits.kv_tokens_gained:,} more" in described(config, flags, "fp8")


def test_savings_are_told_of_the_type_that_is_computed_in() -> None:
    config = read_model_dir(demo.TARGET)
    assert "less than in float32" in described(config, ModelFlags(quantization="int8"))
    in_bfloat16 = described(config, ModelFlags(quantization="int8", dtype="bfloat16"))
    assert in_bfloat16.endswith(saving(replace(config, dtype="bfloat16"), FORMATS["int8"]))
