"""Small models with random weights, made by transformers: the product loads what the reference wrote."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

_SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    # Large enough that logits are far apart: rounding must not decide an argmax.
    "initializer_range": 0.25,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
}
#: Layers with a sliding window beside one that attends everything: KVGroups of their own.
WINDOWED = "qwen2-window"
_ALL = FAMILIES | {
    WINDOWED: (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    )
}

#: Directories of models that were made, until this process ends.
_KEPT = ExitStack()
atexit.register(_KEPT.close)


@cache
def model(family: str) -> tuple[Path, torch.nn.Module]:
    """Return (directory, the reference) of a family."""
    config, cls, more = _ALL[family]
    torch.manual_seed(17)
    reference = cls(config(**_SHAPE, **more)).eval()
    directory = Path(_KEPT.enter_context(TemporaryDirectory(prefix=f"photon-{family}-")))
    reference.save_pretrained(directory)
    return directory, reference


@torch.inference_mode()
def greedy(reference: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the reference's continuation of one prompt alone."""
    ids = torch.tensor([prompt])
    out = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )  # type: ignore[operator]
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]
