"""Public shapes, as in Hugging Face's config.json, and the parts of them that each of several GPUs gets.

This is the only list; options that take the name of a shape take any of these. Nothing was tuned on HELD_OUT: its
products are not in the sweep that the constants of `kernels/linear/cost.py` were fitted to, unless another shape has
the same product. All four of qwen2.5-14b at 32 rows are such (qwen2.5-32b and qwen2.5-32b/2 have them), so it does not
test the model; the other 15 are a third of the shapes.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _config(family: str, sizes: tuple[int, int, int, int, int, int, int], *, tied: bool, **more: Any) -> Config:
    """sizes: hidden, layers, heads, KV heads, head_dim, intermediate, vocabulary."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    named = dict(zip((*names, "intermediate_size", "vocab_size"), sizes, strict=True))
    shared = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "dtype": "bfloat16", "tie_word_embeddings": tied}
    return {"architectures": [family + "ForCausalLM"], "model_type": family.lower()} | shared | named | more


def _llama3(*sizes: int, tied: bool, factor: float) -> Config:
    return _config("Llama", (*sizes, 128256), tied=tied, rope_parameters=_LLAMA3 | {"factor": factor})


def _qwen2(*sizes: int, tied: bool) -> Config:
    return _config("Qwen2", sizes, tied=tied, rms_norm_eps=1e-6, rope_theta=1000000.0)


def _qwen3(*sizes: int, tied: bool) -> Config:
    return _config("Qwen3", (*sizes, 151936), tied=tied, rms_norm_eps=1e-6, rope_theta=1000000.0)


_WHOLE: dict[str, Config] = {
    "1b": _llama3(2048, 16, 32, 8, 64, 8192, tied=True, factor=32.0),
    "3b": _llama3(3072, 28, 24, 8, 128, 8192, tied=True, factor=32.0),
    "8b": _llama3(4096, 32, 32, 8, 128, 14336, tied=False, factor=8.0),
    "mistral-7b": _config("Llama", (4096, 32, 32, 8, 128, 14336, 32768), tied=False, rope_theta=1000000.0),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 64, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 128, 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 128, 11008, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 128, 18944, 152064, tied=False),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 128, 13824, 152064, tied=False),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 128, 27648, 152064, tied=False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 128, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 128, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 8, 128, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 128, 12288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 8, 128, 17408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 8, 128, 25600, tied=False),
    # Quantized, it fits on one H200.
    "70b": _llama3(8192, 80, 64, 8, 128, 28672, tied=False, factor=8.0),
}


def eagle3_config(config: Config, draft_vocab_size: int = 32000) -> Config:
    """The config.json of an EAGLE-3 head for a model of this shape."""
    sizes = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False}
    return config | sizes | {"draft_vocab_size": min(draft_vocab_size, config["vocab_size"])}


def part(config: Config, num_gpus: int) -> Config:
    """The shape of what each of several GPUs holds: its heads and its share of the intermediate size."""
    shared = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    return config | {name: config[name] // num_gpus for name in shared}


#: NAME/2 is the part of one of two GPUs. Smaller shapes are not split: one GPU holds them with ease. Nor is one split
#: into more parts than it has KV heads (qwen2.5-7b has four). Those of mistral-7b would be those of 8b.
_PARTS = {
    f"{name}/{num_gpus}": part(config, num_gpus)
    for name, config in _WHOLE.items()
    for num_gpus in (2, 4, 8)
    if config["hidden_size"] >= 3072 and name != "mistral-7b" and config["num_key_value_heads"] % num_gpus == 0
}
SHAPES: dict[str, Config] = _WHOLE | _PARTS
HELD_OUT = frozenset({
    "qwen2.5-3b", "qwen2.5-14b", "qwen3-1.7b", "qwen3-14b",
    "3b/4", "8b/2", "8b/8", "qwen2.5-7b/4", "qwen2.5-14b/2", "qwen2.5-14b/4", "qwen2.5-32b/8",
    "qwen3-8b/4", "qwen3-14b/2", "qwen3-14b/8", "qwen3-32b/4", "70b/4",
})  # fmt: skip
#: For tests of bits: as many KV heads as heads; sizes that no tile divides; windows that most prompts pass. The tables
#: of `kernels/linear` were not fitted to them, and they are in no sweep.
UNUSUAL: dict[str, Config] = {
    "llama2-7b": _config("Llama", (4096, 32, 32, 32, 128, 11008, 32000), tied=False, rope_theta=10000.0),
    "smollm2-360m": _config("Llama", (960, 32, 15, 5, 64, 2560, 49152), tied=True, rope_theta=100000.0),
    "window-200": _config("Mistral", (2048, 8, 32, 8, 64, 8192, 32768), tied=True, sliding_window=200),
    # A window in the upper half of the layers.
    "window-some": _config(
        "Qwen2", (2048, 8, 16, 8, 128, 8192, 32768), tied=True, use_sliding_window=True, sliding_window=200,
        max_window_layers=4,
    ),
}  # fmt: skip
_GEMMA3: Config = {
    "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6,
}  # fmt: skip
_GEMMA3_FULL = _GEMMA3 | {"sliding_window": 2**20}
_PHI4_MINI: Config = {
    "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}, "rope_theta": 10000.0,
}  # fmt: skip
_QWEN3_MOE: Config = {
    "model_type": "qwen3_moe", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
_DEEPSEEK_LITE: Config = {
    "model_type": "deepseek_v2", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
}  # fmt: skip
#: Of other forms than Llama's, and with windows; in no sweep. mistral-window: 8 of the first Mistral's layers, and an
#: eighth of its window, so that requests of benchmarks pass several. The factors of phi-4-mini are not its own.
OF_OTHER_FORMS: dict[str, Config] = {
    "mistral-window": _config(
        "Mistral", (4096, 8, 32, 8, 128, 14336, 32000), tied=False, rope_theta=10000.0, sliding_window=512
    ),
    "phi-4-mini": _config("Phi3", (3072, 32, 24, 8, 128, 8192, 200064), tied=True, **_PHI4_MINI),
    "gemma3-1b": _config("Gemma3", (1152, 26, 4, 1, 256, 6912, 262144), tied=True, sliding_window=512, **_GEMMA3),
    "gemma3-4b": _config("Gemma3", (2560, 34, 8, 4, 256, 10240, 262208), tied=True, sliding_window=1024, **_GEMMA3),
    # With full attention in every layer, to compare.
    "gemma3-1b-full": _config("Gemma3", (1152, 26, 4, 1, 256, 6912, 262144), tied=True, **_GEMMA3_FULL),
    "gemma3-4b-full": _config("Gemma3", (2560, 34, 8, 4, 256, 10240, 262208), tied=True, **_GEMMA3_FULL),
    "smollm3-3b": _config("SmolLM3", (2048, 36, 16, 4, 128, 11008, 128256), tied=True, rope_theta=5000000.0),
    "olmo2-7b": _config("Olmo2", (4096, 32, 32, 32, 128, 11008, 100352), tied=False, rope_theta=500000.0),
    "qwen3-30b-a3b": _config("Qwen3Moe", (2048, 48, 32, 4, 128, 6144, 151936), tied=False, **_QWEN3_MOE),
    # Two of its layers, which fit in float32.
    "qwen3-30b-a3b-2": _config("Qwen3Moe", (2048, 2, 32, 4, 128, 6144, 151936), tied=False, **_QWEN3_MOE),
    "deepseek-v2-lite": _config("DeepseekV2", (2048, 27, 16, 16, 128, 10944, 102400), tied=False, **_DEEPSEEK_LITE),
    "mixtral-8x7b": _config(
        "Mixtral", (4096, 32, 32, 8, 128, 14336, 32000), tied=False, rope_theta=1000000.0, num_local_experts=8
    ),
}
#: A few of each, where all of them take too long.
SAMPLE = ("3b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-8b", "70b/8")


def weight_bytes(config: Config, num_experts: float = 0) -> int:
    """Bytes that one decode step reads of the weights (a tied head is read as the head).

    num_experts: those that it reaches in a layer; 0: those of one token.
    """
    num_layers, head = config["num_hidden_layers"], 2 * config["vocab_size"] * config["hidden_size"]
    return num_layers * layer_bytes(config, num_experts) + head


def layer_bytes(config: Config, num_experts: float = 0) -> int:
    """Of a layer's projections; 16 bits each."""
    if "kv_lora_rank" in config:
        return _latent_layer_bytes(config, num_experts)
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size, of_router = config["intermediate_size"], 0
    if all_experts := config.get("num_experts") or config.get("num_local_experts"):
        size = (num_experts or config.get("num_experts_per_tok", 2)) * config.get("moe_intermediate_size", size)
        of_router = all_experts
    return round(2 * hidden * (config["head_dim"] * (2 * heads + 2 * kv) + 3 * size + of_router))


def _latent_layer_bytes(config: Config, num_experts: float) -> int:
    """Of a layer with latent attention and experts, those that every token reaches among them."""
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    head, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    attention = hidden * (heads * (head + value) + rank + config["qk_rope_head_dim"])
    expansion = rank * heads * (config["qk_nope_head_dim"] + value)
    size = (num_experts or config["num_experts_per_tok"]) + config["n_shared_experts"]
    experts = hidden * (3 * size * config["moe_intermediate_size"] + config["n_routed_experts"])
    return round(2 * (attention + expansion + experts))


def layer_kv_bytes(config: Config, num_tokens: int) -> int:
    """Of so many keys and values in a layer."""
    if "kv_lora_rank" in config:
        return num_tokens * 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    return num_tokens * 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
