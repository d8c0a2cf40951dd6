"""Every format of --quantization, and the 8-bit KV cache, a second time: what an engine should compute.

In plain torch and from definitions alone; it shares no code with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from benchmarks.embedded_model.llama import Attention, Block, Llama, LlamaShape, rotate

_FP8 = torch.float8_e4m3fn
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}


@dataclass(frozen=True)
class Rounding:
    """A weight format: `block` (rows, columns) of W share a scale, 0 means all of them."""

    kind: str
    block: tuple[int, int]
    has_rounded_activations: bool
    #: By what share it may raise the perplexity.
    limit: float


ROUNDINGS = {
    "int8-g32": Rounding("int8", (1, 32), False, 0.005),
    "int8-g64": Rounding("int8", (1, 64), False, 0.005),
    "int8-g128": Rounding("int8", (1, 128), False, 0.005),
    "int8": Rounding("int8", (1, 0), False, 0.01),
    "w8a8": Rounding("int8", (1, 0), True, 0.01),
    "fp8": Rounding("fp8", (1, 0), True, 0.01),
    "fp8-block": Rounding("fp8", (128, 128), True, 0.01),
    "int4-g128": Rounding("int4", (1, 128), False, 0.05),
}


#: The 8-bit KV cache, and by what share it may raise the perplexity.
KV_FORMAT, KV_LIMIT = "kv-fp8", 0.005


class EightBitKeys(nn.Module):
    """Attention over keys and values that are rounded to e4m3 times the scales [Hkv] of their heads.

    Keys are rounded around an offset [Hkv, D].
    """

    def __init__(self, attention: Attention, keys: torch.Tensor, values: torch.Tensor, offset: torch.Tensor) -> None:
        super().__init__()
        self._attention = attention
        self._scales = keys[:, None, None], values[:, None, None]
        self._offset = offset[:, None]

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        own = self._attention
        q, k, v = (
            projection(x).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        of_keys, of_values = self._scales
        k = _cast((k - self._offset) / of_keys, "fp8") * of_keys + self._offset
        v = _cast(v / of_values, "fp8") * of_values
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return own.o_proj(attended.transpose(1, 2).flatten(2))


def with_eight_bit_keys(directory: Path) -> Llama:
    """Return the Llama of a directory over keys and values in 8 bits, by the scales in its kv_scales.json."""
    model, scales = rounded_model(directory, None), json.loads((directory / "kv_scales.json").read_text())
    constants = zip(scales["keys"], scales["values"], scales["key_offsets"], strict=True)
    for layer, numbers in zip(model.model.layers, constants, strict=True):
        layer.self_attn = EightBitKeys(layer.self_attn, *map(torch.tensor, numbers))
    return model


def round_weight(weight: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return what the format keeps of W [N, K], dequantized in W's dtype."""
    rows, columns = (size or whole for size, whole in zip(rounding.block, weight.shape, strict=True))
    blocks = weight.float().view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    if rounding.kind == "int4":
        scales = _least_error(blocks, largest, weight.dtype)
    else:
        scales = torch.where(largest > 0, largest / _LARGEST[rounding.kind], torch.ones(()))
    if not rounding.has_rounded_activations:
        scales = scales.to(weight.dtype).float()
    return (_cast(blocks / scales, rounding.kind) * scales).view(weight.shape).to(weight.dtype)


def _least_error(blocks: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales of 4 bits with the least squared error: of five that end at a share of the largest number, each
    fitted to its codes once. The code of the largest number is negative, so that its scale has the other sign."""
    exact = blocks.double()
    largest = largest * torch.where(blocks.amax(3, True) >= -blocks.amin(3, True), -1.0, 1.0)
    tried = []
    for share in (0.7, 0.78, 0.86, 0.93, 1.0):
        codes = _cast(blocks / (largest * (share / 7.5)), "int4").double()
        tried.append(((exact * codes).sum(3, True) / (codes * codes).sum(3, True)).float().to(dtype).float())
    errors = [(exact - (_cast(blocks / scales, "int4") * scales).double()).square().sum(3, True) for scales in tried]
    best = torch.stack(errors).nan_to_num(torch.inf).argmin(0, keepdim=True)
    return torch.stack(tried).gather(0, best)[0].nan_to_num(1.0)


def round_rows(x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Return what 8 bits keep of activations [..., K], whose scale is that of a token, or of 128 columns of it."""
    columns = rounding.block[1] or x.shape[-1]
    blocks = x.float().unflatten(-1, (-1, columns))
    scales = (blocks.abs().amax(-1, keepdim=True) / _LARGEST[rounding.kind]).clamp(min=1e-12)
    return (_cast(blocks / scales, rounding.kind) * scales).flatten(-2).to(x.dtype)


def _cast(values: torch.Tensor, kind: str) -> torch.Tensor:
    limit = _LARGEST[kind]
    values = values.clamp(-8 if kind == "int4" else -limit, limit)
    return values.to(_FP8).float() if kind == "fp8" else values.round()


class RoundedLinear(nn.Module):
    """x Wᵀ of rounded weights, and of rounded activations where the format has them."""

    def __init__(self, weight: torch.Tensor, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding
        self._weight = round_weight(weight, rounding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(round_rows(x, self._rounding) if self._rounding.has_rounded_activations else x, self._weight)


def rounded_model(directory: Path, rounding: Rounding | None, dtype: torch.dtype = torch.float32) -> Llama:
    """Return the Llama of a directory in the format: norms folded into the products behind them, then rounded.

    Its embedding, which is its head, keeps its bits.
    """
    model = Llama(_shape(directory)).eval()
    weights = load_file(str(directory / "model.safetensors"))
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    model = model.to(dtype)
    if rounding:
        for layer in model.model.layers:
            _round_layer(layer, rounding)
    return model


def _shape(directory: Path) -> LlamaShape:
    config = json.loads((directory / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return LlamaShape(*(config[name] for name in names))


@torch.no_grad()
def _round_layer(layer: Block, rounding: Rounding) -> None:
    for norm, owner, names in (
        (layer.input_layernorm, layer.self_attn, ("q_proj", "k_proj", "v_proj")),
        (layer.post_attention_layernorm, layer.mlp, ("gate_proj", "up_proj")),
        (None, layer.self_attn, ("o_proj",)),
        (None, layer.mlp, ("down_proj",)),
    ):
        for name in names:
            weight = getattr(owner, name).weight
            setattr(owner, name, RoundedLinear(weight * norm.weight if norm else weight, rounding))
        if norm:
            norm.weight.fill_(1.0)


@torch.no_grad()
def round_embedding(model: Llama) -> None:
    """Round the embedding, which is the head, to int8 with a scale a row."""
    weight = model.model.embed_tokens.weight
    weight.copy_(round_weight(weight, ROUNDINGS["int8"]))


@torch.no_grad()
def logits_of(model: Llama, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [len(ids) - 1, V] behind every id but the last."""
    logits: torch.Tensor = model(torch.tensor([list(ids[:-1])]))[0]
    return logits.float()
