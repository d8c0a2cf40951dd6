"""A checkpoint in 4 bits, or in 8, rounded so that products of a text lose least: `photon-grpc quantize`.

The model reads a text, by default one that it writes itself, and every Linear sums xᵀ x over its inputs. Its weight is
then rounded as `layers/quantization/gptq.py` says, and stored in a form that other engines read as well: 4 bits as
compressed-tensors does (pack-quantized), e4m3 in blocks as DeepSeek's checkpoints are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from photon_grpc.compose import calibration
from photon_grpc.compose.assemble import load_runner
from photon_grpc.config.checkpoint import INDEX_FILE, Checkpoint, read_checkpoint
from photon_grpc.config.formats import foreign_weights, has_weights
from photon_grpc.config.kv_calibration import FILE as KV_SCALES
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.errors import ConfigError
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.quantization import gptq
from photon_grpc.models.weights import linears_of

GROUP = 128
#: Bytes of sums that are held at a time: layers beyond them wait for another reading of the text.
MAX_SUM_BYTES = 16 << 30
#: What is not copied beside weights: it is written anew, or holds of the old weights only.
_OWN_FILES = ("config.json", INDEX_FILE, KV_SCALES)


class QuantizedCheckpoint(NamedTuple):
    """Numbers of a checkpoint: quantized projections, names of the others, ids of the text, bytes of both files."""

    num_quantized: int
    ignored: tuple[str, ...]
    num_tokens: int
    source_bytes: int
    bytes: int


class InputMoments:
    """A LinearMethod that wraps another and accumulates xᵀ x of its inputs."""

    def __init__(self, method: LinearMethod) -> None:
        self.method = method
        self.moments: torch.Tensor | None = None

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        exact = x.float()
        moments = exact.t() @ exact
        self.moments = moments if self.moments is None else self.moments.add_(moments)
        return self.method.apply(linear, x, ctx)

    def taken(self) -> torch.Tensor:
        """Return the sums. Raise ConfigError if the Linear was never called."""
        if self.moments is None:
            raise ConfigError("the text reached no input of a projection of this model")
        return self.moments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)


class StoredForm(NamedTuple):
    """A format as a checkpoint stores it: its Linears, tensors of a weight by suffix, and `quantization_config`."""

    fits: Callable[[Linear], bool]
    tensors: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
    config: Callable[[Sequence[str]], dict[str, Any]]


def quantize(
    directory: Path, output: Path, pieces: Sequence[Sequence[int]], device: str, form: str = "int4-g128"
) -> QuantizedCheckpoint:
    """Write the model of `directory` to `output` in one of FORMS; pieces: the ids of what it reads.

    Raise ConfigError for a model that cannot be, as `check`, and OSError if a file cannot be written.
    """
    stored = FORMS[form]
    config = calibration.piece_config(_checked(directory), device, "torch")
    loaded = load_runner(config, lambda stage, done, total: None)
    linears = [one for one in linears_of(loaded.decoder) if not isinstance(one, LMHead)]
    if not any(map(stored.fits, linears)):
        raise ConfigError(f"{directory} has no projection whose size suits {form}: choose another format")
    ignored = tuple(name for one in linears if not stored.fits(one) for name, _ in one.slices())
    checkpoint, found = read_checkpoint(directory), dict[str, dict[str, torch.Tensor]]()
    for some in _shares([one for one in linears if stored.fits(one)]):
        with _summed(some) as sums:
            for _ in calibration.compute(loaded.runner, pieces):
                pass
        for linear, sum_of in zip(some, sums, strict=True):
            weights = _weights(directory, checkpoint, linear, loaded.decoder.device)
            found |= {name: stored.tensors(weight, sum_of.taken()) for name, weight in weights}
            sum_of.moments = None
    _write(directory, output, checkpoint, found)
    _write_config(directory, output, stored.config(ignored))
    after = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    before = sum(entry.num_bytes for entry in checkpoint.tensors.values())
    return QuantizedCheckpoint(len(found), ignored, sum(map(len, pieces)), before, after)


def check(directory: Path) -> None:
    """Raise ConfigError for a model that is already quantized or has experts."""
    _checked(directory)


def _checked(directory: Path) -> ModelConfig:
    """Return the configuration of a model that can be quantized."""
    config = read_model_dir(directory)
    if config.quantization is not None:
        raise ConfigError(f"{directory} is quantized already: {config.quantization.name}")
    if config.experts is not None:
        raise ConfigError(f"{directory} has experts, whose weights are not quantized from a text")
    return config


def pieces_of(directory: Path, text: str, num_tokens: int) -> list[Sequence[int]]:
    """Return the first ids of a text in pieces. Raise ConfigError without a tokenizer or a text."""
    config = read_model_dir(directory)
    length = min(calibration.PIECE, config.max_position_embeddings - 1)
    return calibration.pieces_of(calibration.ids_of(config, text, num_tokens), length)


def _shares(linears: Sequence[Linear]) -> Iterator[list[Linear]]:
    """Split the Linears into parts whose sums fit into memory."""
    part, size = list[Linear](), 0
    for linear in linears:
        needed = 4 * linear.in_features**2
        if part and size + needed > MAX_SUM_BYTES:
            yield part
            part, size = [], 0
        part.append(linear)
        size += needed
    if part:
        yield part


@contextmanager
def _summed(linears: Sequence[Linear]) -> Iterator[list[InputMoments]]:
    sums = [InputMoments(linear.method) for linear in linears]
    for linear, sum_of in zip(linears, sums, strict=True):
        linear.method = sum_of
    try:
        yield sums
    finally:
        for linear, sum_of in zip(linears, sums, strict=True):
            linear.method = sum_of.method


def _weights(
    directory: Path, checkpoint: Checkpoint, linear: Linear, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the name and the float32 weight of each projection of a Linear, which share their inputs."""
    for name, _ in linear.slices():
        with safe_open(directory / checkpoint.tensors[name + ".weight"].file, framework="pt") as file:
            yield name, file.get_tensor(name + ".weight").to(device, torch.float32)


def _write(directory: Path, output: Path, checkpoint: Checkpoint, found: dict[str, dict[str, torch.Tensor]]) -> None:
    """Write all files but config.json: quantized tensors into that of the weight they are of, the rest as it is."""
    output.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for name in checkpoint.files:
        with safe_open(directory / name, framework="pt") as file:
            tensors: dict[str, torch.Tensor] = {}
            for tensor in file.keys():  # noqa: SIM118
                parts = found.get(tensor.removesuffix(".weight"), {}) if tensor.endswith(".weight") else {}
                of_module = tensor.removesuffix("weight")
                tensors |= {of_module + suffix: part for suffix, part in parts.items()} or {
                    tensor: file.get_tensor(tensor)
                }
        _save(tensors, output / name)
        (output / name).chmod(0o644)  # the library lets only its owner read it
        places |= dict.fromkeys(tensors, name)
    for other in directory.iterdir():
        if other.is_file() and not _is_weights(other.name) and other.name not in _OWN_FILES:
            shutil.copy2(other, output / other.name)
    if len(checkpoint.files) > 1:
        (output / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _is_weights(name: str) -> bool:
    """Return whether a file holds weights, in any format, or is the index of such files: those are the old ones."""
    return bool(has_weights([name]) or foreign_weights([name.removesuffix(".index.json")]))


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {file}: {error}") from None


def _write_config(directory: Path, output: Path, quantization_config: dict[str, Any]) -> None:
    values = json.loads((directory / "config.json").read_text())
    values["quantization_config"] = quantization_config
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _in_groups(weight: torch.Tensor, moments: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = gptq.rounded(weight, moments, GROUP, torch.bfloat16)
    return {
        "weight_packed": codes.values.contiguous().view(torch.int32).cpu(),
        "weight_scale": codes.scales.t().contiguous().cpu(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _config_of_groups(ignored: Sequence[str]) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    weights |= {"symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", *ignored],
    }


def _in_blocks(weight: torch.Tensor, moments: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = gptq.rounded_blocks(weight, moments)
    return {"weight": codes.values.cpu(), "weight_scale_inv": codes.scales.t().contiguous().cpu()}


def _config_of_blocks(ignored: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [gptq.BLOCK, gptq.BLOCK],
        "modules_to_not_convert": ["lm_head", *ignored],
    }


def _has_groups(linear: Linear) -> bool:
    return linear.in_features % GROUP == 0


def _has_blocks(linear: Linear) -> bool:
    return linear.in_features % gptq.BLOCK == 0 and all(size % gptq.BLOCK == 0 for size in linear.outputs.values())


#: What --format takes.
FORMS = {
    "int4-g128": StoredForm(_has_groups, _in_groups, _config_of_groups),
    "fp8-block": StoredForm(_has_blocks, _in_blocks, _config_of_blocks),
}
