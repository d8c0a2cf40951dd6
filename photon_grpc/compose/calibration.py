"""Scales for keys and values of 8 bits, from the largest that a text gives: `photon-grpc calibrate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Return English prose and code that every Python has: the reference of the language."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def calibrate(directory: Path, text: str, num_tokens: int, device: str = "auto") -> Calibrated:
    """Return scales with which the first tokens of `text` stay in range, with room for twice as much.

    The model computes them in its own type. Every layer, plane and head has its own power of two, which rounds no
    number of 8 bits. Raise ConfigError without a tokenizer or a text, and as `assemble` does.
    """
    model_config = read_model_dir(directory)
    if not model_config.has_tokenizer:
        raise ConfigError(f"{directory} has no tokenizer.json: calibration needs the ids of a text")
    ids = Tokenizer.from_file(directory / "tokenizer.json").encode(text, add_special_tokens=False)[:num_tokens]
    if not ids:
        raise ConfigError("the text has no tokens", field="--text")
    largest = _largest(_assembled(directory, device), model_config, ids)
    keys, values = (_scales(plane) for plane in largest.unbind(1))
    name = str(PAGE_DTYPE).removeprefix("torch.")
    scales = KVCalibration(FORMAT, model_config.revision, name, len(ids), keys, values)
    return Calibrated(scales, *largest.amax((0, 2)).tolist())


def _scales(largest: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(power_of_two(number) for number in row) for row in largest.tolist())


def _assembled(directory: Path, device: str) -> Assembled:
    """Load the model with room for one piece in every group of layers."""
    model_config = read_model_dir(directory)
    length = min(PIECE, model_config.max_position_embeddings - 1)
    # With windows at most as many groups as layers.
    num_groups = 1 if len(set(model_config.windows)) == 1 else model_config.num_layers
    config = ServeConfig(
        model=ModelFlags(model=str(directory), max_model_len=length + 1),
        device=DeviceConfig(device=device, enforce_eager=True),
        cache=CacheConfig(block_size=_BLOCK_SIZE, num_blocks=num_groups * -(-length // _BLOCK_SIZE)),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=length),
    )
    return assemble(config, lambda stage, done, total: None)


def _largest(assembled: Assembled, config: ModelConfig, ids: Sequence[int]) -> torch.Tensor:
    """Return the largest absolute numbers, float32 [layers, 2, Hkv], that the pages of all pieces hold."""
    runner = assembled.runner
    if not isinstance(runner, ModelRunner):
        raise TypeError(f"{type(runner).__name__} has no pages")
    largest = torch.zeros(config.num_layers, 2, config.num_kv_heads)
    length = assembled.sizes.max_model_len - 1
    for step, first in enumerate(range(0, len(ids), length), 1):
        piece = tuple(ids[first : first + length])
        blocks = tuple(_blocks(runner.kv, len(piece)))
        admission = Admission(1, piece, len(piece), 0, blocks, SamplingParams(0.0))
        left = () if step == 1 else (1,)
        output = runner.submit(Batch(step, (1,), (len(piece),), (1,), left=left, admissions=(admission,))).result()
        for fault in output.faults.values():
            raise ConfigError(f"the text could not be computed: {fault.message}")
        for layer in range(config.num_layers):
            found = _of_layer(runner, layer, blocks, len(piece))
            largest[layer] = torch.maximum(largest[layer], found)
    return largest


def _blocks(plan: KVPlan, num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Return blocks of its own for every group."""
    columns = plan.columns(num_tokens)
    for group in range(len(plan.groups)):
        yield tuple(range(1 + group * columns, 1 + (group + 1) * columns))


def _of_layer(runner: ModelRunner, layer: int, blocks: Sequence[Sequence[int]], num_tokens: int) -> torch.Tensor:
    """Return the largest numbers of one layer's keys and values, float32 [2, Hkv]."""
    group, section, row = place(runner.kv.groups, layer)
    pages = runner.cache.pages[section]
    numbers = pages[torch.tensor(blocks[group], device=pages.device), row].float().abs()
    # [blocks, 2, Hkv, block_size, D] -> the tokens of a head in order.
    tokens = numbers.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_tokens]
    return tokens.amax((2, 3)).cpu()
