"""Small models made and computed by transformers, and the minimum to run a Decoder over a paged cache."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import chosen_format
from photon_grpc.kernels import AttentionMetadata, select
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import Decoder, build, load

MAX_LEN = 96

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHORT_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

#: name -> (transformers' class prefix, configuration): grouped, multi- and single-KV heads, odd head sizes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-tied": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-untied-linear": ("Llama", {"rope_parameters": LINEAR_ROPE, "num_key_value_heads": 1, "head_dim": 20}),
    "llama-biases": ("Llama", {"rope_parameters": DEFAULT_ROPE, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"rope_parameters": DEFAULT_ROPE, "num_key_value_heads": 4}),
    "qwen2-tied": ("Qwen2", {"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"rope_parameters": DEFAULT_ROPE, "head_dim": 24}),
    "qwen3-tied-bias": (
        "Qwen3",
        {"rope_parameters": DEFAULT_ROPE, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen2-window": (
        "Qwen2",
        {
            "rope_parameters": DEFAULT_ROPE,
            "use_sliding_window": True,
            "sliding_window": 13,
            "max_window_layers": 1,
        },
    ),
    "qwen3-window": (
        "Qwen3",
        {
            "rope_parameters": DEFAULT_ROPE,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-window-between": (
        "Qwen3",
        {
            "rope_parameters": DEFAULT_ROPE,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3moe": (
        "Qwen3Moe",
        {"rope_parameters": DEFAULT_ROPE, "head_dim": 24, "moe_intermediate_size": 32, "norm_topk_prob": True}
        | {"num_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3moe-between": (
        "Qwen3Moe",
        {"rope_parameters": DEFAULT_ROPE, "head_dim": 16, "moe_intermediate_size": 24, "tie_word_embeddings": True}
        | {"num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
    ),
    "mixtral": ("Mixtral", {"rope_parameters": DEFAULT_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek2": (
        "DeepseekV2",
        {"rope_parameters": DEFAULT_ROPE, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
        | {"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 4}
        | {"routed_scaling_factor": 1.5},
    ),
    "deepseek2-yarn-query-latent": (
        "DeepseekV2",
        {"rope_parameters": YARN_ROPE, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10}
        | {"qk_rope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 4, "n_shared_experts": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4},
    ),
    "deepseek3": (
        "DeepseekV3",
        {"rope_parameters": YARN_ROPE, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 10}
        | {"qk_rope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4}
        | {"topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "num_key_value_heads": 4}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    ),
    "mistral": ("Mistral", {"rope_parameters": DEFAULT_ROPE, "sliding_window": None, "head_dim": 20}),
    "mistral-window": ("Mistral", {"rope_parameters": DEFAULT_ROPE, "sliding_window": 13}),
    "phi3": ("Phi3", {"rope_parameters": DEFAULT_ROPE, "pad_token_id": 0}),
    "phi3-window-partial-longrope-tied": (
        "Phi3",
        {
            "hidden_size": 64,
            # Of a window that hides nothing, as Phi-4-mini's.
            "sliding_window": 1000,
            "rope_parameters": SHORT_ROPE,
            "original_max_position_embeddings": 96,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "smollm3": ("SmolLM3", {"rope_parameters": DEFAULT_ROPE, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm3-window-untied": (
        "SmolLM3",
        {
            "rope_parameters": DEFAULT_ROPE,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 13,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2", {"rope_parameters": DEFAULT_ROPE}),
    "olmo2-tied-bias": (
        "Olmo2",
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3",
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_theta": 500.0}},
        },
    ),
    "gemma3-untied": (
        "Gemma3",
        {
            "hidden_size": 64,
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 21,
            "tie_word_embeddings": False,
        },
    ),
}
#: Classes of configurations that are not named as their models.
CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig"}
#: Names of variants with experts.
SPARSE = ("qwen3moe", "qwen3moe-between", "mixtral")
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(variant: str, **sizes: int) -> Any:
    """Return transformers' model of that variant, float32, every parameter random and large enough to matter."""
    prefix, options = VARIANTS[variant]
    config = getattr(transformers, CONFIG_NAMES.get(prefix, prefix + "Config"))(
        **copy.deepcopy(SIZES | options | sizes)
    )
    torch.manual_seed(17)
    model = getattr(transformers, prefix + "ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name and prefix != "Gemma3" else 0.0
            parameter.normal_(center, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def save(model: Any, path: Path, *, shard_size: str = "5GB") -> Path:
    model.save_pretrained(path, max_shard_size=shard_size)
    return path


def load_decoder(
    path: Path, dtype: torch.dtype = torch.float32, *, quantization: str = "auto", kv_dtype: torch.dtype | None = None
) -> Decoder:
    card = read_model_dir(path)
    method = methods(chosen_format(card.quantization, quantization))
    kernels = select("torch", "cpu")
    decoder = build(
        card, dtype=dtype, device="cpu", kernels=kernels, max_model_len=MAX_LEN, method=method, kv_dtype=kv_dtype
    )
    load(decoder, card)
    return decoder


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes the key."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def prompts(seed: int = 5) -> list[list[int]]:
    """Return three prompts of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in (37, 5, 70)]


@torch.inference_mode()
def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return float32 [len(ids), vocab_size]."""
    logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits.float()


@dataclass
class Row:
    ids: list[int]
    blocks: list[int]
    computed: int = 0


@torch.inference_mode()
def paged_logits(
    decoder: Decoder, batch: Sequence[Sequence[int]], *, block_size: int, chunks: Iterable[int]
) -> list[torch.Tensor]:
    """Return logits of every token of every prompt, computed together; each row takes the next of `chunks`."""
    per_row = -(-MAX_LEN // block_size)
    order = torch.randperm(len(batch) * per_row, generator=torch.Generator().manual_seed(1)) + 1
    rows = [Row(list(ids), order[i * per_row : (i + 1) * per_row].tolist()) for i, ids in enumerate(batch)]
    caches = []
    for group, number, _ in decoder.places:
        section = decoder.kv_groups[group].sections[number]
        kept = section.format
        shape = (len(order) + 1, len(section.layers), kept.planes, kept.heads, block_size, kept.width)
        # NaN: who reads what nobody wrote is found out.
        caches.append(torch.full(shape, torch.nan).to(getattr(torch, kept.dtype)))
    sizes = itertools.cycle(chunks)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    while any(row.computed < len(row.ids) for row in rows):
        counts = [min(next(sizes), len(row.ids) - row.computed) for row in rows]
        token_ids, ctx = step_inputs(decoder, rows, counts, caches)
        logits = decoder.logits(decoder.forward(token_ids, ctx))
        for row, count, seen, part in zip(rows, counts, found, logits.split(counts), strict=True):
            row.computed += count
            seen.append(part)
    return [torch.cat(parts) for parts in found]


def step_inputs(
    decoder: Decoder, rows: Sequence[Row], counts: Sequence[int], caches: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, StepContext]:
    """Return the next counts[i] tokens of every row that has any, over the pages of each of the places."""
    live = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
    block_size = caches[0].shape[4]
    spans = [(row, range(row.computed, row.computed + count)) for row, count in live]
    slots = [row.blocks[p // block_size] * block_size + p % block_size for row, span in spans for p in span]
    contexts = [row.computed + count for row, count in live]
    live_counts = [count for _, count in live]
    common = AttentionMetadata(
        query_start=torch.tensor([0, *itertools.accumulate(live_counts)], dtype=torch.int32),
        context_len=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.tensor([row.blocks for row, _ in live], dtype=torch.int32),
        scale=1.0,
        max_query_len=max(live_counts),
        max_context_len=max(contexts),
    )
    positions = torch.tensor([p for _, span in spans for p in span])
    token_ids = torch.tensor([row.ids[p] for row, span in spans for p in span])
    kv = []
    for number, (place, cache) in enumerate(zip(decoder.places, caches, strict=True)):
        window = decoder.kv_groups[place.group].window
        firsts = [row.computed - window + 1 if window else 0 for row, _ in live]
        tables = [
            [0 if (page + 1) * block_size <= first else block for page, block in enumerate(row.blocks)]
            for (row, _), first in zip(live, firsts, strict=True)
        ]
        table = torch.tensor(tables, dtype=torch.int32)
        meta = replace(common, block_tables=table, window=window, scale=place.spec.scale)
        kv.append(decoder.group_context(number, cache, torch.tensor(slots), meta))
    return token_ids, StepContext(positions, tuple(kv))
