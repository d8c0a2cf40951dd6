"""Configurations that no public model has: each computes what transformers computes.

Windows of one token, below a page and above the context; heads in groups of 3, 5 and 7; layers of mixed types; every
kind of rotary scaling. Random models are chaotic, so the bound grows with the error of transformers' own float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.models import Decoder
from photon_grpc.models.fused import with_chains
from tests.examples import examples
from tests.models import reference

Config = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

HEADS = (4, 2), (6, 3), (5, 1), (7, 7), (9, 3), (3, 3)
WINDOWS = 1, 2, 7, 15, 16, 17, 33, 64, 95, 96, 97, 500
FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA3: Config = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: tuple[Config, ...] = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 40},
)
ropes = st.sampled_from(ROPES)


def longrope(draw: Draw, head_dim: int) -> Config:
    """Draw rotary parameters of Phi, of a share of a head that is a number of pairs."""
    shares = [share for share in (0.25, 0.5, 0.75, 1.0) if int(head_dim * share) % 2 == 0]
    share = draw(st.sampled_from(shares))
    pairs = int(head_dim * share) // 2
    factors = st.lists(st.floats(1.0, 8.0), min_size=pairs, max_size=pairs)
    plain = {"rope_theta": 10000.0, "partial_rotary_factor": share}
    long = {"rope_type": "longrope", "original_max_position_embeddings": draw(st.sampled_from([96, 128]))}
    long |= {"short_factor": draw(factors), "long_factor": draw(factors)}
    return plain | draw(st.sampled_from([{"rope_type": "default"}, long]))


@st.composite
def configs(draw: Draw) -> tuple[str, Config]:
    """Draw transformers' class prefix and the keys of a configuration."""
    family = draw(st.sampled_from(["Gemma3", "Mistral", "Phi3", "SmolLM3", "Olmo2", "Qwen3"]))
    (heads, kv_heads), head_dim = draw(st.sampled_from(HEADS)), draw(st.sampled_from([8, 10, 14, 24, 32]))
    layers, window = draw(st.integers(1, 4)), draw(st.sampled_from(WINDOWS))
    types = draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=layers, max_size=layers))
    keys: Config = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    keys |= {"hidden_size": heads * head_dim, "rope_parameters": draw(ropes), "pad_token_id": 0}
    if family in ("Gemma3", "Mistral", "Qwen3"):
        keys |= {"head_dim": head_dim, "hidden_size": heads * 8}
    if family == "Gemma3":
        by_type = {"rope_parameters": {FULL: draw(ropes), SLIDING: draw(ropes)}, "query_pre_attn_scalar": 24}
        keys |= by_type | {"sliding_window": window, "layer_types": types}
    if family in ("Mistral", "Phi3"):
        keys["sliding_window"] = draw(st.sampled_from([None, window]))
    if family == "Phi3":
        keys["rope_parameters"] = longrope(draw, head_dim)
        keys["original_max_position_embeddings"] = keys["rope_parameters"].get("original_max_position_embeddings", 128)
    if family == "SmolLM3":
        keys["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    if family in ("SmolLM3", "Qwen3"):
        keys |= {"use_sliding_window": True, "sliding_window": window, "layer_types": types}
    return family, keys


def float64_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return reference.reference_logits(copy.deepcopy(model).double(), ids)


def decoders(path: Path) -> list[Decoder]:
    """Return the model in general kernels, and fused where any layer has the form of a chain."""
    fused = with_chains(reference.load_decoder(path))
    return [reference.load_decoder(path), *([] if fused is None else [fused])]


@given(
    drawn=configs(),
    block_size=st.sampled_from([8, 16, 64]),
    chunks=st.sampled_from([[1000], [1], [7, 1, 13], [33, 2]]),
    lengths=st.lists(st.sampled_from([1, 2, 17, 64, 65, 95]), min_size=2, max_size=2),
)
@settings(max_examples=examples(40))
def test_odd_configurations_equal_transformers(
    drawn: tuple[str, Config], block_size: int, chunks: list[int], lengths: list[int]
) -> None:
    family, keys = drawn
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as directory:
        patch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)
        patch.setitem(reference.VARIANTS, "odd", (family, keys))
        model = reference.make_model("odd")
        path = reference.save(model, Path(directory))
        batch = [reference.prompts(length)[2][:length] * 2 for length in lengths]
        batch = [ids[:length] for ids, length in zip(batch, lengths, strict=True)]
        for decoder in decoders(path):
            found = reference.paged_logits(decoder, batch, block_size=block_size, chunks=chunks)
            for ids, logits in zip(batch, found, strict=True):
                exact = float64_logits(model, ids)
                own = (reference.reference_logits(model, ids) - exact).abs().max().item()
                torch.testing.assert_close(logits, exact, atol=max(1e-4, 8 * own), rtol=0)
