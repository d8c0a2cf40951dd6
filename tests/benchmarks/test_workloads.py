"""Shapes and random weights are what Hugging Face's Llama takes, and the floors count all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import shapes, workloads
from photon_grpc.config.model_dir import read_model_dir

TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 500,
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.full
def test_transformers_finds_every_weight_that_the_floor_counts(
    is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = workloads.SHAPES["1b"] | TINY | {"tie_word_embeddings": is_tied}
    monkeypatch.setitem(workloads.SHAPES, "tiny", shape)
    workloads.write_weights("tiny", workloads.write_model_dir("tiny", tmp_path))
    model, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(found.values()), found
    sizes = {name: weight.nbytes for name, weight in model.named_parameters()}
    # A decode step reads one row of an embedding that is not the head; norms are too small to count.
    unread = sum(size for name, size in sizes.items() if "norm" in name)
    unread += 0 if is_tied else sizes["model.embed_tokens.weight"]
    assert workloads.weight_bytes("tiny") == sum(sizes.values()) - unread


def test_kv_bytes_are_keys_and_values_of_every_layer() -> None:
    assert workloads.kv_bytes("1b", [3, 5]) == 8 * 2 * 16 * 8 * 64 * 2


@pytest.mark.parametrize(("asked", "found"), [(0, 4096), (100, 4096), (34048, 34048)])
def test_a_shape_is_made_for_the_contexts_asked_for(asked: int, found: int, tmp_path: Path) -> None:
    config = read_model_dir(workloads.write_model_dir("1b", tmp_path, asked))
    assert config.max_position_embeddings == found


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b"])
@pytest.mark.full
def test_every_family_is_written_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(workloads.SHAPES, "tiny", workloads.SHAPES[name] | TINY)
    workloads.write_weights("tiny", workloads.write_model_dir("tiny", tmp_path))
    _, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(found.values()), found


def test_a_part_holds_its_share_of_heads_and_of_the_intermediate_size() -> None:
    whole, half = workloads.SHAPES["qwen3-32b"], workloads.SHAPES["qwen3-32b/2"]
    assert 2 * shapes.layer_bytes(half) == shapes.layer_bytes(whole)
    assert 2 * shapes.layer_kv_bytes(half, 7) == shapes.layer_kv_bytes(whole, 7)
    assert half["hidden_size"] == whole["hidden_size"]


def test_a_third_of_the_shapes_is_held_out() -> None:
    assert shapes.SHAPES.keys() > shapes.HELD_OUT
    assert 3 * len(shapes.HELD_OUT) >= len(shapes.SHAPES)
