"""The named workloads, exactly, so that any program can run the same: token ids, lengths; random weights of a shape."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import shapes

SHAPES = shapes.SHAPES | shapes.OF_OTHER_FORMS
VOCAB_SIZE = 128256

_MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood 2014."""
    z = (x + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def token(stream: int, request: int, position: int) -> int:
    return 1000 + splitmix64((stream << 40) ^ (request << 20) ^ position) % 126000


def prompt(stream: int, request: int, length: int) -> tuple[int, ...]:
    return tuple([token(stream, request, position) for position in range(length)])


def mixed_512() -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of 512 requests."""
    draw = random.Random(0)
    return [(draw.randint(64, 1024), draw.randint(32, 512)) for _ in range(512)]


def shared_prefix(stream: int, count: int = 256, common: int = 1024, own: int = 64) -> list[tuple[int, ...]]:
    beginning = prompt(stream, 0, common)
    return [beginning + prompt(stream + 1, request, own) for request in range(count)]


def write_model_dir(shape: str, directory: Path, max_len: int = 0) -> Path:
    """A directory with nothing but config.json, to be served with --load-format dummy; for at least `max_len`
    positions."""
    directory.mkdir(parents=True, exist_ok=True)
    longest = max(max_len, SHAPES[shape]["max_position_embeddings"])
    (directory / "config.json").write_text(json.dumps(SHAPES[shape] | {"max_position_embeddings": longest}))
    return directory


def write_weights(shape: str, directory: Path) -> None:
    """Random bfloat16 weights under the names of Hugging Face, a safetensors file a layer; norms are ones."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    for number, tensors in enumerate(_tensors(SHAPES[shape])):
        drawn = {
            name: torch.ones(size, dtype=torch.bfloat16)
            if len(size) == 1
            else torch.empty(size, dtype=torch.bfloat16).uniform_(-0.03, 0.03, generator=generator)
            for name, size in tensors.items()
        }
        save_file(drawn, directory / f"model-{number:05}.safetensors", {"format": "pt"})
    _write_index(directory)


def _tensors(s: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes, file by file."""
    hidden, inner, kv = s["hidden_size"], s["intermediate_size"], s["num_key_value_heads"] * s["head_dim"]
    queries = s["num_attention_heads"] * s["head_dim"]
    for layer in range(s["num_hidden_layers"]):
        parts = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        if s["model_type"] == "qwen3":
            parts |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (s["head_dim"],))
        named = {f"{name}.weight": size for name, size in parts.items()}
        if s["model_type"] == "qwen2":
            named |= {f"self_attn.{part}_proj.bias": parts[f"self_attn.{part}_proj"][:1] for part in "qkv"}
        yield {f"model.layers.{layer}.{name}": size for name, size in named.items()}
    rest: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s["vocab_size"], hidden)}
    rest["model.norm.weight"] = (hidden,)
    yield rest if s["tie_word_embeddings"] else rest | {"lm_head.weight": (s["vocab_size"], hidden)}


def _write_index(directory: Path) -> None:
    """Return which file holds which tensor."""
    from safetensors import safe_open

    files = sorted(directory.glob("*.safetensors"))
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names |= dict.fromkeys(opened.keys(), file.name)
    size = sum(file.stat().st_size for file in files)
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def weight_bytes(shape: str) -> int:
    """Bytes that one decode step reads of the weights (a tied head is read as the head)."""
    return shapes.weight_bytes(SHAPES[shape])


def kv_bytes(shape: str, contexts: Sequence[int]) -> int:
    """Bytes that one decode step reads of the KV cache: in layers with a window, those of the window."""
    config = SHAPES[shape]
    window, num_layers = config.get("sliding_window"), config["num_hidden_layers"]
    num_full = num_layers // config.get("sliding_window_pattern", num_layers + 1) if window else num_layers
    in_window = sum(min(context, window or 0) for context in contexts)
    num_keys = num_full * sum(contexts) + (num_layers - num_full) * in_window
    return shapes.layer_kv_bytes(config, num_keys)
