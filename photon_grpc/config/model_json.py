"""The keys that are read from a model directory's JSON files, with their types, bounds and defaults."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, field

from photon_grpc.config.latent import LatentKeys

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Heads = Annotated[int, Meta(ge=1, le=2**12)]
#: One token id or several, or none.
Ids = int | tuple[int, ...] | None


class ArchitectureJson(Struct, kw_only=True):
    """The keys of config.json that name the architecture."""

    architectures: Annotated[list[str], Meta(min_length=1)] | None = None
    model_type: str = ""


class ConfigJson(LatentKeys, kw_only=True):
    """The keys of config.json of a supported architecture; `model_dir.py` decides those that are None.

    A key may be null where its type has None: where transformers takes null as it takes a missing key. Nulls that the
    family does not read are left out before.
    """

    dtype: str | None = None
    torch_dtype: str | None = None
    #: Set in a quantized checkpoint; `quantization_config.py` reads it.
    quantization_config: Any = None
    vocab_size: Annotated[int, Meta(ge=1, le=2**24)]
    hidden_size: Annotated[int, Meta(ge=1, le=2**17)]
    intermediate_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_layers: Annotated[int, Meta(ge=1, le=1024)] = field(name="num_hidden_layers")
    num_heads: Heads = field(name="num_attention_heads")
    num_kv_heads: Heads | None = field(name="num_key_value_heads", default=None)
    head_dim: Annotated[int, Meta(ge=1, le=1024)] | None = None
    #: "": that of the family.
    hidden_act: str = ""
    #: Gemma's name of hidden_act.
    hidden_activation: str = ""
    #: Scores are divided by its square root; 0: by that of head_dim.
    query_pre_attn_scalar: Annotated[float, Meta(ge=1e-6, le=1e6)] = 0.0
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    rms_norm_eps: Annotated[float, Meta(ge=0.0, le=1.0)] = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: Count | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 6
    max_window_layers: Count = 28
    layer_types: list[str] | None = None
    bos_token_id: Ids = None
    eos_token_id: Ids = None


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """The keys of generation_config.json: sampling defaults, and token ids that override those of config.json."""

    do_sample: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(ge=1e-9, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None
    bos_token_id: Ids = None
    eos_token_id: Ids = None


class NamedTemplate(Struct):
    name: str
    template: str


class AddedToken(Struct):
    content: str


class TokenizerJson(Struct, kw_only=True):
    """The keys of tokenizer_config.json."""

    chat_template: str | list[NamedTemplate] | None = None
    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
