"""The architectures that can be served, with the facts that are in their code in transformers, not in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

#: Which layers have a sliding window if config.json does not name `layer_types`.
#:
#: never:           none.
#: from_layer:      those from `max_window_layers` on, if `use_sliding_window` is true.
#: without_rotary:  those without rotary embedding, if `use_sliding_window` is true.
#: every_layer:     all, if `sliding_window` is a number; `layer_types` may not say otherwise.
#: pattern:         all but every `sliding_window_pattern`-th.
Slides = Literal["never", "from_layer", "without_rotary", "every_layer", "pattern"]


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """The facts about an architecture's experts that are in its code, not in config.json.

    size: the key of the intermediate size of one expert. number: of experts, if config.json has none. renormalises:
    whether the weights of a token's experts add up to one; None: as `norm_topk_prob` says. may_mix: whether config.json
    may name layers without experts.
    """

    size: str
    number: int
    renormalises: bool | None = None
    may_mix: bool = False
    #: Whether the first layers may have none, and the others may have some that every token reaches.
    is_deepseek: bool = False
    #: Whether experts are chosen by sigmoids and a bias, within groups.
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The facts about an architecture that are in its code, not in config.json."""

    model_type: str
    #: Bias of the q, k and v projections; None: as in `attention_bias`.
    qkv_bias: bool | None = None
    #: Bias of the output projection; None: as in `attention_bias`.
    output_bias: bool | None = None
    #: Bias of the feed-forward block; None: as in `mlp_bias`.
    mlp_bias: bool | None = None
    #: RMSNorm of q and k.
    qk_norm: bool = False
    #: The activation of the feed-forward block.
    activation: str = "silu"
    slides: Slides = "never"
    #: Whether a part of each head may be rotated.
    may_rotate_part: bool = False
    #: Whether config.json may name layers without rotary embedding.
    may_skip_rotary: bool = False
    #: Whether layers with a window have rotary parameters of their own.
    has_local_rotary: bool = False
    #: Whether config.json scales scores by `query_pre_attn_scalar`.
    has_query_scale: bool = False
    #: Whether the keys are in `text_config`, beside those of other parts.
    has_text_config: bool = False
    #: What the names of the model's tensors begin with before "model." and "lm_head".
    tensor_prefix: str = ""
    #: What the names of tensors begin with that other parts have.
    other_parts: tuple[str, ...] = ()
    #: Whether attention keeps latents of keys and values.
    is_latent: bool = False
    #: Whether rotary embedding may be scaled by yarn.
    has_yarn: bool = False
    #: What the code says about experts; None: the family has none.
    experts: ExpertKind | None = None
    #: Further names of kinds of rotary scaling.
    rope_synonyms: Mapping[str, str] = field(default_factory=dict)
    #: What transformers takes for keys that config.json lacks, where it is not our default; most may not be null.
    defaults: Mapping[str, Any] = field(default_factory=dict)


_WINDOW = {"sliding_window": 4096}
_GEMMA3 = Family(
    "gemma3_text",
    mlp_bias=False,
    qk_norm=True,
    activation="gelu_pytorch_tanh",
    slides="pattern",
    has_local_rotary=True,
    has_query_scale=True,
    defaults=_WINDOW
    | {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
)

#: Architectures that can be served; `models/builder.py` builds each from its ModelConfig.
FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, output_bias=False, slides="from_layer", defaults=_WINDOW),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, slides="from_layer", defaults=_WINDOW | {"head_dim": 128}),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        mlp_bias=False,
        qk_norm=True,
        experts=ExpertKind("moe_intermediate_size", 128, may_mix=True),
        defaults={
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "vocab_size": 151_936,
        },
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        slides="every_layer",
        experts=ExpertKind("intermediate_size", 8, renormalises=True),
        defaults={
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        is_latent=True,
        has_yarn=True,
        experts=ExpertKind("moe_intermediate_size", 64, renormalises=False, is_deepseek=True),
        defaults={
            "q_lora_rank": 1536,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "vocab_size": 102_400,
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        is_latent=True,
        has_yarn=True,
        experts=ExpertKind("moe_intermediate_size", 256, is_deepseek=True, has_bias=True),
        defaults={
            "head_dim": 64,
            "q_lora_rank": 1536,
            "moe_intermediate_size": 2048,
            "vocab_size": 129_280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
        },
    ),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        slides="every_layer",
        defaults=_WINDOW | {"num_key_value_heads": 8},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        slides="every_layer",
        may_rotate_part=True,
        rope_synonyms={"su": "longrope", "yarn": "longrope"},
        defaults={"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        slides="without_rotary",
        may_skip_rotary=True,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "Olmo2ForCausalLM": Family("olmo2", mlp_bias=False, qk_norm=True, defaults={"rms_norm_eps": 1e-5}),
    "Gemma3ForCausalLM": _GEMMA3,
    # The text part; images are not taken.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        model_type="gemma3",
        has_text_config=True,
        tensor_prefix="language_model.",
        other_parts=("vision_tower.", "multi_modal_projector."),
    ),
}
