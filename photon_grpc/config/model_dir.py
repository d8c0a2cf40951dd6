"""A Hugging Face model directory as one frozen ModelConfig: config.json, generation_config.json, the chat template, the
headers of the safetensors files. No torch; nothing of the directory is executed (`auto_map` is ignored).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from photon_grpc.config.checkpoint import Checkpoint, read_checkpoint
from photon_grpc.config.json_fields import JsonFields, parse_object, read_bytes, shown
from photon_grpc.config.rope import RopeSpec, read_rope
from photon_grpc.errors import ModelLoadError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 2**20

DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_OF_HEADER = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """The facts that an architecture's own code adds to config.json."""

    model_type: str
    #: Bias of the q, k and v projections; None: what `attention_bias` says.
    qkv_bias: bool | None = None
    #: Bias of the output projection; None: what `attention_bias` says.
    output_bias: bool | None = None
    #: RMSNorm over each head of q and k.
    qk_norm: bool = False
    #: Where config.json has no head_dim; 0: hidden_size / num_attention_heads.
    head_dim: int = 0
    #: Whether config.json may give layers a sliding window.
    may_slide: bool = False


#: Architectures that can be served; `models/builder.py` builds each from its ModelConfig.
FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, output_bias=False, may_slide=True),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, may_slide=True),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values of generation_config.json; None where it has none. `do_sample: false` is temperature 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the rest of the program knows of a model directory. Sizes are counts of elements or tokens."""

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
    rope: RopeSpec
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: Of each layer: tokens that a token looks back, itself included; 0: all.
    windows: tuple[int, ...]
    #: "float32", "bfloat16" or "float16": what config.json says, else what most bytes of the weights are, else float32.
    dtype: str
    bos_token_id: int | None
    #: Any of these ends an output.
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    has_tokenizer: bool
    #: Jinja source; None where the directory has no template.
    chat_template: str | None
    #: (name, text) of the tokens that a chat template may name, such as ("bos_token", "<s>").
    special_tokens: tuple[tuple[str, str], ...]
    #: sha256 over config.json and the names, sizes and headers of the safetensors files.
    revision: str


def read_model_dir(path: str | Path, checkpoint: Checkpoint | None = None) -> ModelConfig:
    """Read and check the directory at `path`; weights themselves are not read (they may be absent: see load-format
    dummy). `checkpoint` takes the place of the headers of its weights, where those are not there yet.

    Accepts the spellings of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`,
    `dtype`). Raise ModelLoadError naming the file and the key. A known key of a wrong type is refused even where
    another key or file comes first.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelLoadError(f"the model directory {path} does not exist")
    raw_config = read_bytes(path / CONFIG_FILE)
    config = JsonFields(parse_object(raw_config, CONFIG_FILE), CONFIG_FILE)
    checkpoint = read_checkpoint(path) if checkpoint is None else checkpoint
    architecture = _architecture(config)
    _refuse_unsupported(config)
    vocab_size = config.integer("vocab_size", 1, 2**24)
    generation = _optional_object(path / GENERATION_FILE)
    tokenizer = _optional_object(path / TOKENIZER_CONFIG_FILE)
    bos, eos = (
        [file.ids(key, vocab_size) for file in (generation, config)] for key in ("bos_token_id", "eos_token_id")
    )
    bos_token_ids = bos[0] or bos[1]
    return ModelConfig(
        path=path,
        architecture=architecture,
        model_type=FAMILIES[architecture].model_type,
        vocab_size=vocab_size,
        dtype=_dtype(config, checkpoint),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=eos[0] or eos[1],
        generation=_generation_defaults(generation),
        has_tokenizer=(path / TOKENIZER_FILE).is_file(),
        chat_template=_chat_template(path, tokenizer),
        special_tokens=_special_tokens(tokenizer),
        revision=_revision(raw_config, checkpoint),
        **_dimensions(config, FAMILIES[architecture]),
    )


def _architecture(config: JsonFields) -> str:
    """The name in `architectures`; a config saved without weights has only its model_type."""
    names = config.values.get("architectures")
    model_type = config.text("model_type", "")
    if names is None:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type] or [model_type]
    if not isinstance(names, list) or not names or any(not isinstance(name, str) for name in names):
        raise config.error("architectures", "must be a list with one name")
    architecture: str = names[0]
    if architecture not in FAMILIES:
        raise config.error(
            "architectures", f"names {shown(architecture)}, which is not supported; known are {', '.join(FAMILIES)}"
        )
    return architecture


def _refuse_unsupported(config: JsonFields) -> None:
    """Keys that change what the model computes in a way that is not implemented: never ignored."""
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is set; quantized checkpoints are not supported")
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", f"is {shown(config.text('hidden_act'))}; only silu is supported")


def _dimensions(config: JsonFields, family: Family) -> dict[str, Any]:
    hidden_size = config.integer("hidden_size", 1, 2**17)
    num_heads = config.integer("num_attention_heads", 1, 2**12)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    num_kv_heads = config.integer("num_key_value_heads", 1, 2**12, num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_attention_heads", f"{num_heads} is not divisible by num_key_value_heads {num_kv_heads}")
    max_position_embeddings = config.integer("max_position_embeddings", 2, 2**27)
    attention_bias = config.boolean("attention_bias", False)
    num_layers = config.integer("num_hidden_layers", 1, 1024)
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.integer("intermediate_size", 1, 2**20),
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": config.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        "rope": read_rope(config, max_position_embeddings),
        "tie_word_embeddings": config.boolean("tie_word_embeddings", False),
        "qkv_bias": attention_bias if family.qkv_bias is None else family.qkv_bias,
        "output_bias": attention_bias if family.output_bias is None else family.output_bias,
        "mlp_bias": config.boolean("mlp_bias", False),
        "qk_norm": family.qk_norm,
        "windows": _windows(config, family, num_layers),
    }


def _windows(config: JsonFields, family: Family, num_layers: int) -> tuple[int, ...]:
    """Of each layer; 0: none. `layer_types` names the layers that slide, without it they are those from
    max_window_layers on."""
    window = _window(config, family)
    first = config.integer("max_window_layers", 0, 2**31 - 1, 28)
    kinds = config.values.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or any(kind not in LAYER_TYPES for kind in kinds):
        problem = f"must be a list of {' and '.join(LAYER_TYPES)}; others are not supported; is {shown(kinds)}"
        raise config.error("layer_types", problem)
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"names {len(kinds)} layers of {num_layers}: name every layer once")
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and not window:
        problem = "names sliding_attention, but there is no window: set use_sliding_window true and sliding_window"
        raise config.error("layer_types", problem)
    return tuple(window if slide else 0 for slide in sliding)


def _window(config: JsonFields, family: Family) -> int:
    """Of the layers that slide; 0: none does. As in transformers one that is not said is 4,096, null is none."""
    is_null = config.values.get("sliding_window", 0) is None
    window = 0 if is_null else config.integer("sliding_window", 0, 2**31 - 1, 4096)
    if not config.boolean("use_sliding_window", False) or is_null:
        return 0
    if not family.may_slide:
        raise config.error("use_sliding_window", f"is true; {family.model_type} has no sliding-window attention")
    if not window:
        raise config.error("sliding_window", "must be at least 1 where use_sliding_window is true, is 0")
    return window


def _head_dim(config: JsonFields, family: Family, hidden_size: int, num_heads: int) -> int:
    if not config.has("head_dim") and not family.head_dim and hidden_size % num_heads:
        raise config.error("hidden_size", f"{hidden_size} is not divisible by num_attention_heads {num_heads}")
    head_dim = config.integer("head_dim", 1, 1024, family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for rotary embedding, is {head_dim}")
    return head_dim


def _dtype(config: JsonFields, checkpoint: Checkpoint) -> str:
    named = [_named_dtype(config, key) for key in ("dtype", "torch_dtype") if config.has(key)]
    if named:
        return named[0]
    num_bytes: Counter[str] = Counter()
    for entry in checkpoint.tensors.values():
        num_bytes[_DTYPE_OF_HEADER.get(entry.dtype, "float32")] += entry.num_bytes
    return num_bytes.most_common(1)[0][0] if num_bytes else "float32"


def _named_dtype(config: JsonFields, key: str) -> str:
    dtype = config.text(key).removeprefix("torch.")
    if dtype not in DTYPES:
        raise config.error(key, f"must be one of {', '.join(DTYPES)}, is {shown(dtype)}")
    return dtype


def _optional_object(path: Path) -> JsonFields:
    """The JSON object in `path`; an empty one where the file does not exist."""
    return JsonFields(parse_object(read_bytes(path), path.name) if path.exists() else {}, path.name)


def _generation_defaults(generation: JsonFields) -> GenerationDefaults:
    is_greedy = not generation.boolean("do_sample", True)
    temperature = generation.optional_number("temperature", 0.0, 100.0)
    top_k = generation.integer("top_k", -1, 2**31 - 1) if generation.has("top_k") else None
    return GenerationDefaults(
        temperature=0.0 if is_greedy else temperature,
        top_p=generation.optional_number("top_p", 1e-9, 1.0),
        top_k=top_k,
        min_p=generation.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=generation.optional_number("repetition_penalty", 1e-3, 1e3),
    )


def _chat_template(path: Path, tokenizer: JsonFields) -> str | None:
    """From chat_template.jinja, else tokenizer_config.json, where a list of named templates gives the one named
    "default"."""
    said = _template_said(tokenizer)
    if not (path / TEMPLATE_FILE).exists():
        return said
    try:
        return read_bytes(path / TEMPLATE_FILE, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError:
        raise ModelLoadError(f"{TEMPLATE_FILE}: is not UTF-8") from None


def _template_said(tokenizer: JsonFields) -> str | None:
    said = tokenizer.values.get("chat_template")
    named = said if isinstance(said, list) else [{"name": "default", "template": said}]
    templates: dict[str, str] = {}
    for entry in named if said is not None else ():
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise tokenizer.error("chat_template", f"must be a string or a list of named templates, is {shown(said)}")
        templates[name] = template
    return templates.get("default")


def _special_tokens(tokenizer: JsonFields) -> tuple[tuple[str, str], ...]:
    names = [name for name in ("bos_token", "eos_token", "pad_token", "unk_token") if tokenizer.has(name)]
    return tuple((name, _token_text(tokenizer, name)) for name in names)


def _token_text(tokenizer: JsonFields, name: str) -> str:
    """Of a token that is written as its text, or as an object with its `content`."""
    value = tokenizer.values[name]
    return tokenizer.object(name).text("content") if isinstance(value, dict) else tokenizer.text(name)


def _revision(raw_config: bytes, checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256(hashlib.sha256(raw_config).digest())
    for name, size, header in checkpoint.files:
        digest.update(f"{name}\0{size}\0".encode())
        digest.update(hashlib.sha256(header).digest())
    return digest.hexdigest()
