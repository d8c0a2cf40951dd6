"""A Hugging Face model directory as one frozen ModelConfig.

It is read from config.json, generation_config.json, the chat template and the headers of the safetensors files, without
torch. No code in the directory is executed (`auto_map` is ignored).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from photon_grpc.config.checkpoint import fingerprint, read_checkpoint
from photon_grpc.config.experts import ExpertSpec, read_experts
from photon_grpc.config.families import FAMILIES, Family
from photon_grpc.config.json_file import T, as_struct, parse_object, read_bytes, refusal, shown
from photon_grpc.config.latent import LatentSpec, read_latent
from photon_grpc.config.model_json import (
    AddedToken,
    ArchitectureJson,
    ConfigJson,
    GenerationDefaults,
    TokenizerJson,
)
from photon_grpc.config.quantization import WeightFormat
from photon_grpc.config.quantization_place import KEYS as QUANTIZATION_KEYS
from photon_grpc.config.quantization_place import find_quantization
from photon_grpc.config.rope import (
    CONFIG_FILE,
    RopeSpec,
    check_rope,
    read_local_ropes,
    read_rope,
    read_rotated_layers,
    refuse_per_layer,
)
from photon_grpc.config.unread import without_unread_nulls
from photon_grpc.config.windows import read_windows
from photon_grpc.errors import ModelLoadError

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 2**20
MAX_HEAD_DIM = 1024

DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_OF_HEADER = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

#: Fields of ModelConfig that are taken from config.json unchanged.
_AS_READ = (
    *("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings"),
)


#: Keys beside `text_config` that override those in it.
_OF_ALL_PARTS = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings", *QUANTIZATION_KEYS)

#: Of the keys with a default of a family those that may be null: then there is no window, and there are no latents.
_NONE_IS_MEANT = {"sliding_window", "q_lora_rank"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All facts about a model directory; sizes are counts of elements or tokens."""

    path: Path
    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    #: The rotary embedding of each layer; None: it has none.
    ropes: tuple[RopeSpec | None, ...]
    #: Factor of q · k.
    attention_scale: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: For each layer the number of tokens that a token attends to, itself included; 0: all.
    windows: tuple[int, ...]
    #: None: no layer has any.
    experts: ExpertSpec | None
    #: None: attention keeps keys and values.
    latent: LatentSpec | None
    #: The format of quantized weights; None: they are not.
    quantization: WeightFormat | None
    #: "float32", "bfloat16" or "float16": as in config.json, else that of most bytes of the weights, else float32.
    dtype: str
    bos_token_id: int | None
    #: Any of these ends an output.
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    has_tokenizer: bool
    #: Jinja source; None if the directory has no template.
    chat_template: str | None
    #: (name, text) of the tokens that a chat template may use, such as ("bos_token", "<s>").
    special_tokens: tuple[tuple[str, str], ...]
    #: What the names of its tensors begin with before "model." and "lm_head".
    tensor_prefix: str
    #: What the names of tensors begin with that are not read: those of a model's other parts.
    other_parts: tuple[str, ...]
    #: sha256 of config.json, a quantize_config.json that is read, and the names, sizes and headers of the safetensors
    #: files.
    revision: str

    def has_long_rotary(self, max_model_len: int) -> bool:
        """Return whether `max_model_len` chooses long factors of a rotary embedding."""
        return any(rope is not None and rope.is_long(max_model_len) for rope in self.ropes)


def read_model_dir(
    path: str | Path, *, has_weights: bool = True, families: Mapping[str, Family] = FAMILIES
) -> ModelConfig:
    """Read and check a model directory, without the data of its weights, and without `has_weights` their headers.

    Its architecture must be one of `families`.

    The weights may be absent in any case (see --load-format dummy). Accepts the spellings of transformers 4
    (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`). Raise ModelLoadError naming the
    file and the key, also for a bad value of a known key that another key or file overrides.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelLoadError(f"the model directory {path} does not exist")
    raw_config = read_bytes(path / CONFIG_FILE)
    values = parse_object(raw_config, CONFIG_FILE)
    architecture = _architecture(as_struct(values, ArchitectureJson, CONFIG_FILE), families)
    family = families[architecture]
    values = _text_values(values) if family.has_text_config else values
    values = dict(family.defaults) | without_unread_nulls(values, family)
    config = _read_config(values, family)
    quantization = find_quantization(path, values)
    headers = quantization.file + (fingerprint(path) if has_weights else b"")
    generation = _read_optional(path / GENERATION_FILE, GenerationDefaults)
    tokenizer = _read_optional(path / TOKENIZER_CONFIG_FILE, TokenizerJson)
    bos_token_ids = _ids("bos_token_id", config, generation)
    return ModelConfig(
        path=path,
        architecture=architecture,
        model_type=family.model_type,
        quantization=quantization.format,
        dtype=_named_dtype(config) or (_dtype_of_weights(path) if has_weights else "float32"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=_ids("eos_token_id", config, generation),
        # As in transformers, `do_sample: false` means temperature 0.
        generation=structs.replace(generation, temperature=0.0) if generation.do_sample is False else generation,
        has_tokenizer=(path / TOKENIZER_FILE).is_file(),
        chat_template=_chat_template(path, tokenizer),
        special_tokens=_special_tokens(tokenizer),
        tensor_prefix=family.tensor_prefix,
        other_parts=family.other_parts,
        revision=hashlib.sha256(hashlib.sha256(raw_config).digest() + headers).hexdigest(),
        **_dimensions(config, values, family),
    )


def _text_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `text_config`, and those beside it that are of the whole model."""
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise refusal(CONFIG_FILE, "text_config", f"must be an object, is {shown(text)}")
    return text | {key: values[key] for key in _OF_ALL_PARTS if values.get(key) is not None}


def _read_config(values: dict[str, Any], family: Family) -> ConfigJson:
    config = as_struct(values, ConfigJson, CONFIG_FILE)
    for key in sorted(family.defaults.keys() - _NONE_IS_MEANT):
        if values[key] is None:
            raise refusal(CONFIG_FILE, key, f"is null; {family.model_type} needs a value")
    if not family.has_local_rotary:
        refuse_per_layer(values)
    _refuse_unsupported(config, family)
    return config


def _read_optional(path: Path, kind: type[T]) -> T:
    """Return the JSON object in `path`, an empty one if the file does not exist."""
    return as_struct(parse_object(read_bytes(path), path.name) if path.exists() else {}, kind, path.name)


def _architecture(config: ArchitectureJson, families: Mapping[str, Family]) -> str:
    """Return the first of `architectures`, or that of model_type, the only key in a config saved without weights."""
    of_type = (name for name, family in families.items() if family.model_type == config.model_type)
    architecture = config.architectures[0] if config.architectures else next(of_type, config.model_type)
    if architecture not in families:
        problem = f"names {shown(architecture)}, which is not supported; supported: {', '.join(families)}"
        raise refusal(CONFIG_FILE, "architectures", problem)
    return architecture


def _refuse_unsupported(config: ConfigJson, family: Family) -> None:
    """Raise ModelLoadError for keys that change the model's formulas in a way that is not implemented."""
    for key in ("hidden_act", "hidden_activation"):
        if getattr(config, key) not in ("", family.activation):
            problem = f"is {shown(getattr(config, key))}; only {family.activation} is supported"
            raise refusal(CONFIG_FILE, key, problem)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key) is not None:
            raise refusal(CONFIG_FILE, key, f"is {shown(getattr(config, key))}; soft-capping is not supported")
    if config.use_bidirectional_attention:
        raise refusal(CONFIG_FILE, "use_bidirectional_attention", "is true, which is not supported")
    for key, of_family in (("attention_bias", family.qkv_bias), ("mlp_bias", family.mlp_bias)):
        if getattr(config, key) and of_family is False:
            raise refusal(CONFIG_FILE, key, f"is true; {family.model_type} has no such biases")


def _dimensions(config: ConfigJson, values: dict[str, Any], family: Family) -> dict[str, Any]:
    num_kv_heads = config.num_kv_heads or config.num_heads
    if config.num_heads % num_kv_heads:
        problem = f"{config.num_heads} is not divisible by num_key_value_heads {num_kv_heads}"
        raise refusal(CONFIG_FILE, "num_attention_heads", problem)
    latent = read_latent(config, values, family)
    head_dim = latent.rotated if latent else _head_dim(config, family)
    rotates = read_rotated_layers(config, config.num_layers, family)
    windows = read_windows(config, family, rotates)
    ropes = _ropes(config, values, family, head_dim, rotates, windows)
    scale = ((family.has_query_scale and config.query_pre_attn_scalar) or (latent.head if latent else head_dim)) ** -0.5
    if latent and ropes[0]:
        scale *= ropes[0].score_factor
    return {name: getattr(config, name) for name in _AS_READ} | {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "ropes": ropes,
        "attention_scale": scale,
        "latent": latent,
        "qkv_bias": config.attention_bias if family.qkv_bias is None else family.qkv_bias,
        "output_bias": config.attention_bias if family.output_bias is None else family.output_bias,
        "mlp_bias": config.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        "qk_norm": family.qk_norm,
        "windows": windows,
        "experts": read_experts(config, values, family.experts, config.num_layers),
    }


def _ropes(
    config: ConfigJson, values: dict[str, Any], family: Family, head_dim: int,
    rotates: tuple[bool, ...], windows: tuple[int, ...],
) -> tuple[RopeSpec | None, ...]:  # fmt: skip
    if family.has_local_rotary:
        full, local = read_local_ropes(config, values, family)
    else:
        full = local = read_rope(config, family)
    for spec in (full, local):
        check_rope(spec, head_dim)
    of_layers = (local if window else full for window in windows)
    return tuple(spec if is_rotated else None for spec, is_rotated in zip(of_layers, rotates, strict=True))


def _head_dim(config: ConfigJson, family: Family) -> int:
    head_dim, num_heads = config.head_dim, config.num_heads
    if not head_dim and config.hidden_size % num_heads:
        problem = f"{config.hidden_size} is not divisible by num_attention_heads {num_heads}"
        raise refusal(CONFIG_FILE, "hidden_size", problem)
    head_dim = head_dim or config.hidden_size // num_heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        problem = f"must be even and at most {MAX_HEAD_DIM} for rotary embedding, is {head_dim}"
        raise refusal(CONFIG_FILE, "head_dim", problem)
    return head_dim


def _named_dtype(config: ConfigJson) -> str | None:
    named = []
    for key in ("dtype", "torch_dtype"):
        if (dtype := getattr(config, key)) is not None:
            named.append(dtype.removeprefix("torch."))
            if named[-1] not in DTYPES:
                raise refusal(CONFIG_FILE, key, f"must be one of {', '.join(DTYPES)}, is {shown(dtype)}")
    return named[0] if named else None


def _dtype_of_weights(path: Path) -> str:
    """Return the dtype of most bytes of the weights that are not quantized."""
    num_bytes: Counter[str] = Counter()
    for entry in read_checkpoint(path).tensors.values():
        if entry.dtype in _DTYPE_OF_HEADER:
            num_bytes[_DTYPE_OF_HEADER[entry.dtype]] += entry.num_bytes
    return num_bytes.most_common(1)[0][0] if num_bytes else "float32"


def _ids(key: str, config: ConfigJson, generation: GenerationDefaults) -> tuple[int, ...]:
    """Check the ids in both files; return those of generation_config.json, else of config.json, each once."""
    found = []
    for file, value in ((GENERATION_FILE, getattr(generation, key)), (CONFIG_FILE, getattr(config, key))):
        found.append(tuple(dict.fromkeys(value if isinstance(value, tuple) else () if value is None else (value,))))
        for token in found[-1]:
            if not 0 <= token < config.vocab_size:
                raise refusal(file, key, f"must be between 0 and {config.vocab_size - 1}, holds {shown(token)}")
    return found[0] or found[1]


def _chat_template(path: Path, tokenizer: TokenizerJson) -> str | None:
    """Read the template from chat_template.jinja, else from tokenizer_config.json, there "default" of a list."""
    templates = tokenizer.chat_template
    if (path / TEMPLATE_FILE).exists():
        try:
            return read_bytes(path / TEMPLATE_FILE, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            raise ModelLoadError(f"{TEMPLATE_FILE}: is not UTF-8") from None
    if isinstance(templates, list):
        return {entry.name: entry.template for entry in templates}.get("default")
    return templates


def _special_tokens(tokenizer: TokenizerJson) -> tuple[tuple[str, str], ...]:
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: token.content if isinstance(token, AddedToken) else token for name, token in tokens.items()}
    return tuple((name, text) for name, text in texts.items() if text is not None)
