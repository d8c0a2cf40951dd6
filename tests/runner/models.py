"""Small models with random weights, made by transformers: the product loads what the reference wrote."""

from __future__ import annotations

import atexit
import copy
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

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
#: The window of every layer that has one in FURTHER.
WINDOW = 24
_SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "pad_token_id": 0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
    "attention_factor": 1.2,
}
#: Families whose layers differ more from Llama's.
FURTHER: dict[str, tuple[type, type, dict[str, Any]]] = {
    "mistral": (MistralConfig, MistralForCausalLM, _SMALL | {"sliding_window": WINDOW, "head_dim": 32}),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        _SMALL | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 512},
    ),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, _SMALL | {"no_rope_layers": [1, 0, 1]}),
    "qwen3moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        _SMALL
        | {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        _SMALL | {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "deepseek2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        _SMALL
        | {"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, _SMALL),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        _SMALL | {"num_hidden_layers": 7, "head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 40},
    ),
}
_ALL = (
    FAMILIES
    | FURTHER
    | {
        WINDOWED: (
            Qwen2Config,
            Qwen2ForCausalLM,
            {
                "tie_word_embeddings": False,
                "use_sliding_window": True,
                "sliding_window": 13,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        # Half of every size is a multiple of the groups and blocks of 128.
        "wide": (
            LlamaConfig,
            LlamaForCausalLM,
            {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512}
            | {"num_hidden_layers": 2, "tie_word_embeddings": False},
        ),
    }
)

#: Directories of models that were made, until this process ends.
_KEPT = ExitStack()
atexit.register(_KEPT.close)


@cache
def model(family: str, vocab_size: int = 320) -> tuple[Path, torch.nn.Module]:
    """Return (directory, the reference) of a family."""
    config, cls, more = _ALL[family]
    torch.manual_seed(17)
    reference = cls(config(**(_SHAPE | copy.deepcopy(more) | {"vocab_size": vocab_size}))).eval()
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


@torch.inference_mode()
def most_likely(reference: torch.nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """Return what the reference says after the prompt and each beginning of the output.

    A greedy output is the reference's own if this is the output.
    """
    logits = reference(torch.tensor([prompt + output])).logits[0]
    ids: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return ids
