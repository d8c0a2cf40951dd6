"""Tiny random checkpoints in every quantized layout, and transformers' model with the weights that they stand for.

GPTQ and AWQ are written here, number by number, from their public definitions; the layouts of compressed-tensors by
its library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.reference import SIZES

FILE = "model.safetensors"
#: Sizes of which groups, words and blocks are parts; q, k and v have biases.
CONFIG: dict[str, Any] = SIZES | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A layout: quantization_config, and weight [N, K] -> tensors by suffix, and the weight that they stand for."""

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def make_model(**changes: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen2Config(**(CONFIG | changes))
    model = transformers.Qwen2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(path: Path, layout: str, left_out: str = "", **keys: Any) -> Any:
    """Write a checkpoint in the layout; return transformers' model with the same weights, float32.

    left_out: a part of the names of weights that are not quantized. keys: of quantization_config.
    """
    written, model = LAYOUTS[layout], make_model()
    model.save_pretrained(path)
    tensors = load_file(path / FILE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_quantized(name) and not (left_out and left_out in name):
                del tensors[name]
                stored, weight = written.quantize(parameter)
                tensors |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in stored.items()}
                parameter.copy_(weight)
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": written.config | keys}))
    return model


def _grouped(weight: torch.Tensor, group: int, bits: int, zeros: np.ndarray | int) -> tuple[Any, ...]:
    """Return q and z, unsigned, float16 scales [N, K / g] and the weight that they stand for."""
    rows, columns = weight.shape
    parts = weight.detach().numpy().reshape(rows, columns // group, group)
    scales = (np.abs(parts).max(-1) / (2 ** (bits - 1) - 1)).astype(np.float16)
    z = np.broadcast_to(np.asarray(zeros), scales.shape).astype(np.int64)
    exact = np.rint(parts / scales[:, :, None].astype(np.float32)).astype(np.int64) + z[:, :, None]
    q = exact.clip(0, 2**bits - 1)
    whole = (q - z[:, :, None]).astype(np.float32) * scales[:, :, None].astype(np.float32)
    return q.reshape(rows, columns), z, scales, torch.from_numpy(whole.reshape(rows, columns))


def _words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack the last axis into int32; `order` is the value in each place of a word."""
    number = 32 // bits
    words = np.zeros((*values.shape[:-1], values.shape[-1] // number), np.uint32)
    for place, value in enumerate(order or range(number)):
        words |= values[..., value::number].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(bits: int, group: int, *, symmetric: bool, stored_less: int) -> Written:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        size = group if group > 0 else columns
        some = np.random.default_rng(rows).integers(1, 16, (rows, columns // size))
        zeros = 2 ** (bits - 1) if symmetric else some
        q, z, scales, whole = _grouped(weight, size, bits, zeros)
        return {
            ".qweight": _words(q, bits).t().contiguous(),
            ".qzeros": _words(z.T - stored_less, bits),
            ".scales": torch.from_numpy(scales.T.copy()),
            ".g_idx": torch.tensor([column // size for column in range(columns)], dtype=torch.int32),
        }, whole

    form = "gptq" if stored_less else "gptq_v2"
    return Written(
        {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False,
         "checkpoint_format": form},
        quantize,
    )  # fmt: skip


def awq(group: int) -> Written:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        zeros = np.random.default_rng(columns).integers(0, 16, (rows, columns // group))
        q, z, scales, whole = _grouped(weight, group, 4, zeros)
        return {
            ".qweight": _words(q.T, 4, order),
            ".qzeros": _words(z.T, 4, order),
            ".scales": torch.from_numpy(scales.T.copy()),
        }, whole

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Written(config, quantize)


def compressed(form: str, *, inputs: dict[str, Any] | None = None, **weights: Any) -> Written:
    """Return a layout of compressed-tensors, written and read back by its library."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        kind: Any = PackedQuantizationCompressor if form == "pack-quantized" else NaiveQuantizationCompressor
        largest = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
        state = {"weight": weight.detach().clone(), "weight_scale": _largest(weight, weights) / largest}
        if not weights["symmetric"]:
            generator = torch.Generator().manual_seed(len(weight))
            state["weight_zero_point"] = torch.randint(
                -8, 8, state["weight_scale"].shape, generator=generator, dtype=torch.int8
            )
        stored = kind.compress(state, scheme)
        whole = kind.decompress(dict(stored), scheme)["weight"]
        return {"." + name: tensor.contiguous() for name, tensor in stored.items()}, whole.float()

    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return Written(
        {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
         "config_groups": {"group_0": group}, "ignore": ["lm_head"]},
        quantize,
    )  # fmt: skip


def _largest(weight: torch.Tensor, args: dict[str, Any]) -> torch.Tensor:
    """Return the largest |W| of each scale, in the shape of scales."""
    size = weight.detach().abs()
    if args["strategy"] == "tensor":
        return size.max()[None]
    if args["strategy"] == "channel":
        return size.amax(1, keepdim=True)
    if args["strategy"] == "group":
        return size.unflatten(1, (-1, args["group_size"])).amax(-1)
    return size.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))


def fp8(block: bool) -> Written:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        size = (rows // 128, 128, columns // 128, 128) if block else (1, rows, 1, columns)
        parts = weight.detach().view(size)
        scales = parts.abs().amax((1, 3), keepdim=True) / 448
        values = (parts / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {
            ".weight": values.view(rows, columns),
            ".weight_scale_inv": scales[:, 0, :, 0].contiguous() if block else scales.view(()),
        }
        return stored, (values.float() * scales).view(rows, columns)

    size = [128, 128] if block else None
    return Written({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}, quantize)


def _args(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy} | more


TOKENS = _args(8, "token", dynamic=True)
FLOAT_TOKENS = TOKENS | {"type": "float"}
LAYOUTS = {
    "gptq": gptq(4, 64, symmetric=True, stored_less=1),
    "gptq-asymmetric": gptq(4, 32, symmetric=False, stored_less=1),
    "gptq-v2": gptq(4, 32, symmetric=False, stored_less=0),
    "gptq-8-bits": gptq(8, 32, symmetric=True, stored_less=1),
    "gptq-rows": gptq(4, -1, symmetric=True, stored_less=1),
    "awq": awq(64),
    "w4a16": compressed("pack-quantized", **_args(4, "group", group_size=32)),
    "w4a16-asymmetric": compressed("pack-quantized", **_args(4, "group", group_size=64, symmetric=False)),
    "w4a16-rows": compressed("pack-quantized", **_args(4, "channel")),
    "w8a16": compressed("pack-quantized", **_args(8, "group", group_size=128)),
    "w8a16-rows": compressed("int-quantized", **_args(8, "channel")),
    "w8a8": compressed("int-quantized", inputs=TOKENS, **_args(8, "channel")),
    "fp8-rows": compressed("float-quantized", inputs=FLOAT_TOKENS, **_args(8, "channel", type="float")),
    "fp8-tensor": compressed("float-quantized", inputs=FLOAT_TOKENS, **_args(8, "tensor", type="float")),
    "fp8-blocks": compressed(
        "float-quantized",
        inputs=FLOAT_TOKENS | {"strategy": "group", "group_size": 128},
        **_args(8, "block", type="float", block_structure=[128, 128]),
    ),
    "fp8": fp8(True),
    "fp8-whole": fp8(False),
}
#: Layouts whose activations have 8 bits.
EIGHT_BITS = ("w8a8", "fp8-rows", "fp8-tensor", "fp8-blocks", "fp8", "fp8-whole")
