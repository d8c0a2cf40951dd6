"""`photon-grpc calibrate`: scales of 8-bit keys and values, from the largest values on a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.config.flags import CacheConfig, DeviceConfig, ModelFlags, SchedulerConfig, ServeConfig
from photon_grpc.config.kv_calibration import FORMAT, KVCalibration
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.kv import KVPlan, place
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import ConfigError
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE, power_of_two
from photon_grpc.runner.model_runner import ModelRunner

#: Tokens that attend to one another; the text is cut into pieces of so many.
PIECE = 2048
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The scales, and the largest key and value of all layers."""

    scales: KVCalibration
    largest_key: float
    largest_value: float


def default_text() -> str:
    """Return the language reference that every Python includes: English prose and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def ids_of(model_config: ModelConfig, text: str, num_tokens: int) -> Sequence[int]:
    """Return the first ids of a text. Raise ConfigError without a tokenizer or a text."""
    directory = model_config.path
    if not model_config.has_tokenizer:
        raise ConfigError(f"{directory} has no tokenizer.json, which the text needs", field="--text")
    ids = Tokenizer.from_file(directory / "tokenizer.json").encode(text, add_special_tokens=False)[:num_tokens]
    if not ids:
        raise ConfigError("the text has no tokens", field="--text")
    return ids


def calibrate(directory: Path, text: str, num_tokens: int, device: str = "auto") -> Calibrated:
    """Return scales with which the first tokens of `text` stay in range, with room for twice as much.

    The model computes them in its own type. Every layer, plane and head has its own power of two, which rounds no
    number of 8 bits. Raise ConfigError for latent attention, without a tokenizer or a text, and as `assemble` does.
    """
    model_config = read_model_dir(directory)
    if model_config.latent:
        message = f"{directory} has latent attention, whose KV cache cannot be --kv-cache-dtype fp8: it needs no scales"
        raise ConfigError(message, field="model")
    ids = ids_of(model_config, text, num_tokens)
    seen = _seen(_assembled(model_config, device), model_config, ids)
    offsets = [_rounded(layer.mean) for layer in seen]
    keys, values = zip(*(layer.scales(offset) for layer, offset in zip(seen, offsets, strict=True)), strict=True)
    nested = tuple(tuple(map(tuple, offset.tolist())) for offset in offsets)
    scales = KVCalibration(FORMAT, model_config.revision, name_of(PAGE_DTYPE), len(ids), keys, values, nested)
    largest = torch.stack([torch.maximum(layer.most, -layer.least).amax((1, 2)) for layer in seen])
    return Calibrated(scales, *largest.amax(0).tolist())


def _rounded(offsets: torch.Tensor) -> torch.Tensor:
    """Round to few digits, which are precise enough."""
    return offsets.bfloat16().float()


@dataclass(slots=True)
class LayerStatistics:
    """The keys and values of a layer so far: least, most and sum of every dimension, float32 [2, Hkv, D]."""

    least: torch.Tensor
    most: torch.Tensor
    total: torch.Tensor
    num_tokens: int

    @property
    def mean(self) -> torch.Tensor:
        """Return the mean key, [Hkv, D]."""
        return self.total[0] / self.num_tokens

    def add(self, other: LayerStatistics) -> None:
        self.least, self.most = torch.minimum(self.least, other.least), torch.maximum(self.most, other.most)
        self.total += other.total
        self.num_tokens += other.num_tokens

    def scales(self, offset: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return a scale of every head for its keys without `offset` [Hkv, D], and one for its values."""
        shift = torch.stack((offset, torch.zeros_like(offset)))
        largest = torch.maximum(self.most - shift, shift - self.least).amax(2)
        keys, values = (tuple(power_of_two(number) for number in row) for row in largest.tolist())
        return keys, values


def _assembled(model_config: ModelConfig, device: str) -> Assembled:
    return assemble(piece_config(model_config, device), lambda stage, done, total: None)


def piece_config(model_config: ModelConfig, device: str, kernels: str = "auto") -> ServeConfig:
    """Return the configuration of a model with room for one piece in every group of layers."""
    length = min(PIECE, model_config.max_position_embeddings - 1)
    # With windows at most as many groups as layers.
    num_groups = 1 if len(set(model_config.windows)) == 1 else model_config.num_layers
    return ServeConfig(
        model=ModelFlags(model=str(model_config.path), max_model_len=length + 1),
        device=DeviceConfig(device=device, kernels=kernels, enforce_eager=True),
        cache=CacheConfig(block_size=_BLOCK_SIZE, num_blocks=num_groups * -(-length // _BLOCK_SIZE)),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=length),
    )


def compute(runner: ModelRunner, pieces: Iterable[Sequence[int]]) -> Iterator[tuple[tuple[tuple[int, ...], ...], int]]:
    """Compute pieces of ids one after the other; return the blocks of each and the number of its tokens behind it."""
    for step, piece in enumerate(pieces, 1):
        blocks = tuple(_blocks(runner.kv, len(piece)))
        admission = Admission(1, tuple(piece), len(piece), 0, blocks, SamplingParams(0.0))
        left = () if step == 1 else (1,)
        output = runner.submit(Batch(step, (1,), (len(piece),), (1,), left=left, admissions=(admission,))).result()
        for fault in output.faults.values():
            raise ConfigError(f"the text could not be computed: {fault.message}")
        yield blocks, len(piece)


def pieces_of(ids: Sequence[int], length: int) -> list[Sequence[int]]:
    return [ids[first : first + length] for first in range(0, len(ids), length)]


def _seen(model: Assembled, config: ModelConfig, ids: Sequence[int]) -> list[LayerStatistics]:
    """Return the statistics of every layer over the pages of all pieces."""
    runner = model.runner
    if not isinstance(runner, ModelRunner):
        raise TypeError(f"{type(runner).__name__} has no pages")
    seen: list[LayerStatistics] = []
    for blocks, num_tokens in compute(runner, pieces_of(ids, model.sizes.max_model_len - 1)):
        found = [_of_layer(runner, layer, blocks, num_tokens) for layer in range(config.num_layers)]
        for layer, other in zip(seen, found, strict=False):
            layer.add(other)
        seen = seen or found
    return seen


def _blocks(plan: KVPlan, num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Return separate blocks for every group."""
    columns = plan.columns(num_tokens)
    for group in range(len(plan.groups)):
        yield tuple(range(1 + group * columns, 1 + (group + 1) * columns))


def _of_layer(runner: ModelRunner, layer: int, blocks: Sequence[Sequence[int]], num_tokens: int) -> LayerStatistics:
    group, section, row = place(runner.kv.groups, layer)
    pages = runner.cache.pages[section]
    numbers = pages[torch.tensor(blocks[group], device=pages.device), row].float()
    # [blocks, 2, Hkv, block_size, D] -> the tokens of a head in order.
    tokens = numbers.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens].cpu()
    return LayerStatistics(tokens.amin(2), tokens.amax(2), tokens.sum(2), num_tokens)
