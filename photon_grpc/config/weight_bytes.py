"""The format of a model's weights, and their bytes in it from the model's sizes alone: what a format saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from photon_grpc.config.flags import ModelFlags
from photon_grpc.config.latent import LatentSpec
from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.config.quantization import FORMATS, HEAD, WeightBytes, WeightFormat, chosen_format
from photon_grpc.errors import ConfigError, ModelLoadError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Projections that are multiplied as one weight; model types whose checkpoints have that one weight.
_MERGED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj", "kv_a_proj_with_mqa")
_MERGED_BEFORE = ("phi3",)
#: The value of --kv-cache-dtype with which keys and values have the type of the layers; others are of 8 bits.
AUTO = "auto"


def format_of(model: ModelConfig, flags: ModelFlags) -> WeightFormat | None:
    """Return the format of the weights of a model by these flags, as `chosen_format` does."""
    return chosen_format(
        model.quantization,
        flags.quantization,
        flags.quantization_head,
        flags.quantization_embedding,
        is_tied=model.tie_word_embeddings,
    )


def served(model: ModelConfig, flags: ModelFlags) -> ModelConfig:
    """Return the model with the dtype in which these flags serve it."""
    return model if flags.dtype == "auto" else replace(model, dtype=flags.dtype)


def linear_bytes(model: ModelConfig, form: WeightFormat | None) -> int:
    """Return the bytes of all projections and of an untied head; None: none is quantized. Biases are not counted."""
    itemsize = _BYTES[model.dtype]
    return sum(
        rows * columns * itemsize if form is None or not form.covers(name) else _bytes(form, rows, columns, itemsize)
        for name, rows, columns in _projections(model)
    ) + _head_bytes(model, form, itemsize)


def embedding_bytes(model: ModelConfig, form: WeightFormat | None) -> int:
    """Return the bytes of the embedding, with those of a head that has the same tensors."""
    itemsize = _BYTES[model.dtype]
    if form is not None and form.embedding:
        return _bytes(FORMATS[form.embedding], model.vocab_size, model.hidden_size, itemsize)
    return model.vocab_size * model.hidden_size * itemsize


def refuse_without_room(model: ModelConfig, flags: ModelFlags, num_bytes: int, num_gpus: int) -> None:
    """Raise ModelLoadError if a GPU's part of the weights is more than the bytes that it has room for."""
    model, form = served(model, flags), format_of(model, flags)
    needed = (linear_bytes(model, form) + embedding_bytes(model, form)) // num_gpus
    if needed > num_bytes:
        each = "a GPU" if num_gpus == 1 else f"each of {num_gpus} GPUs"
        message = f"the weights need {needed / 1e9:,.1f} GB on {each}, which has room for {num_bytes / 1e9:,.1f} GB"
        raise ModelLoadError(message, field="model", needed=needed, limit=num_bytes)


def step_bytes(model: ModelConfig, num_tokens: int) -> float:
    """Return the bytes of weights that a step of so many tokens is expected to read; all experts are reached alike."""
    total, spec = linear_bytes(model, None), model.experts
    if spec is None:
        return total
    of_expert = 3 * spec.intermediate_size * model.hidden_size * _BYTES[model.dtype]
    return total - (spec.num_experts - spec.reached(num_tokens)) * sum(spec.layers) * of_expert


def kv_token_bytes(model: ModelConfig, kv_dtype: str = AUTO) -> int:
    """Return the bytes of one token's keys and values, or latents, in all layers; kv_dtype: of --kv-cache-dtype."""
    itemsize = _BYTES[model.dtype] if kv_dtype == AUTO else 1
    if model.latent:
        return model.num_layers * model.latent.width * itemsize
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim * itemsize


def weight_bytes(model: ModelConfig, form: WeightFormat, kv_dtype: str = AUTO) -> WeightBytes:
    """Return what the format takes and saves, beside keys and values of a type of --kv-cache-dtype."""
    held, plain = linear_bytes(model, form), linear_bytes(model, None)
    if form.embedding:
        held, plain = held + embedding_bytes(model, form), plain + embedding_bytes(model, None)
    saved = max(0, plain - held)
    return WeightBytes(held, saved, saved // kv_token_bytes(model, kv_dtype))


def weight_bytes_by(model: ModelConfig, flags: ModelFlags, kv_dtype: str) -> WeightBytes | None:
    """Return what the format by these flags takes and saves; None: there is none."""
    form = format_of(model, flags)
    return None if form is None else weight_bytes(served(model, flags), form, kv_dtype)


def saving(model: ModelConfig, form: WeightFormat, kv_dtype: str = AUTO) -> str:
    """Return such as "7.1 GB of weights, 6.9 GB less than in bfloat16: room for 52,700 more tokens of KV cache"."""
    if problem := misfit(model, form):
        return f"does not suit this model, {problem}"
    held, saved, tokens = weight_bytes(model, form, kv_dtype)
    if not saved:
        more = held - linear_bytes(model, None)
        return f"{shown_bytes(held)} of weights, {shown_bytes(more)} more than in {model.dtype}"
    room = f"room for {tokens:,} more tokens of KV cache"
    return f"{shown_bytes(held)} of weights, {shown_bytes(saved)} less than in {model.dtype}: {room}"


def shown_bytes(number: int) -> str:
    """Return such as "8.03 GB" or "6.6 MB"."""
    return f"{number / 1e9:,.3g} GB" if number >= 10**9 else f"{number / 1e6:,.3g} MB"


def misfit(model: ModelConfig, form: WeightFormat) -> str:
    """Return why a layer does not suit the format, "" if all do as far as the model's sizes tell.

    Parts of ranks and experts that every token reaches are checked when they are made.
    """
    of_rows, of_columns = form.block
    for name, rows, columns in _projections(model) if of_columns else ():
        if not form.covers(name) or ".shared_experts." in name:
            continue
        if of_rows > 1 and rows % of_rows and name.endswith(_MERGED) and model.model_type not in _MERGED_BEFORE:
            return f"{name}: {rows} output features are not a multiple of the {of_rows} rows of a block"
        if of_rows <= 1 and columns % of_columns:
            return f"{name}: {columns} input features are not a multiple of the {of_columns} columns of a group"
    return ""


def described(model: ModelConfig, flags: ModelFlags, kv_dtype: str = AUTO) -> str:
    """Return the format of the weights by a checkpoint and flags, with what it saves, or "none"."""
    try:
        form = format_of(model, flags)
    except ConfigError:
        # It is a reason why `serve` would not start.
        form = model.quantization
    return "none" if form is None else f"{form.name}: {saving(served(model, flags), form, kv_dtype)}"


def _projections(model: ModelConfig) -> Iterator[tuple[str, int, int]]:
    """Return the name, rows and columns of every projection of every layer."""
    sizes = _attention(model) if model.latent is None else _latent_attention(model, model.latent)
    for layer in range(model.num_layers):
        prefix = f"{model.tensor_prefix}model.layers.{layer}."
        for name, (rows, columns) in (sizes | _feed_forward(model, layer)).items():
            yield prefix + name, rows, columns


def _attention(model: ModelConfig) -> dict[str, tuple[int, int]]:
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    kv_heads = model.num_kv_heads * model.head_dim
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
    }


def _latent_attention(model: ModelConfig, latent: LatentSpec) -> dict[str, tuple[int, int]]:
    """Return those of latent attention; what expands latents stays as it is, and is not among them."""
    hidden, heads = model.hidden_size, model.num_heads * latent.head
    of_kv = {"self_attn.kv_a_proj_with_mqa": (latent.width, hidden)}
    output = {"self_attn.o_proj": (hidden, model.num_heads * latent.value)}
    if not latent.query_rank:
        return {"self_attn.q_proj": (heads, hidden)} | of_kv | output
    ranks = {"self_attn.q_a_proj": (latent.query_rank, hidden), "self_attn.q_b_proj": (heads, latent.query_rank)}
    return ranks | of_kv | output


def _feed_forward(model: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of a layer's projections behind attention, or of all of its experts'."""
    experts, hidden = model.experts, model.hidden_size
    if experts is None or not experts.layers[layer]:
        prefixes, size = ["mlp."], model.intermediate_size
    else:
        prefixes, size = [f"mlp.experts.{n}." for n in range(experts.num_experts)], experts.intermediate_size
    # Those that every token reaches are one block in a checkpoint and several here.
    blocks = dict.fromkeys(prefixes, 1)
    if experts is not None and experts.num_shared and experts.layers[layer]:
        blocks["mlp.shared_experts."] = experts.num_shared
    return {
        prefix + name: (count * hidden, size) if name == "down_proj" else (count * size, hidden)
        for prefix, count in blocks.items()
        for name in ("gate_proj", "up_proj", "down_proj")
    }


def _head_bytes(model: ModelConfig, form: WeightFormat | None, itemsize: int) -> int:
    """Return the bytes of the head; quantized on request it takes memory beside a tied embedding of 16 bits."""
    rows, columns = model.vocab_size, model.hidden_size
    if form is not None and form.head:
        if form.embedding and model.tie_word_embeddings:
            return 0
        return _bytes(FORMATS[form.head], rows, columns, itemsize)
    if model.tie_word_embeddings:
        return 0
    is_quantized = form is not None and form.covers(model.tensor_prefix + HEAD)
    return _bytes(form, rows, columns, itemsize) if is_quantized and form else rows * columns * itemsize


def _bytes(form: WeightFormat, rows: int, columns: int, itemsize: int) -> int:
    """Return the bytes of W [rows, columns] with its scales and zero points."""
    of_rows, of_columns = form.block
    num_scales = -(-rows // (of_rows or 1)) * -(-columns // (of_columns or columns))
    scale_bytes = 4 if form.activation_bits == 8 else itemsize
    return rows * columns * form.bits // 8 + num_scales * scale_bytes * (1 + form.has_zeros)
