"""Sizes that are decided by settings, device and model: context, sequences, tokens of a block and a step."""

from __future__ import annotations

from dataclasses import dataclass

from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in tokens and sequences; `depth` in steps."""

    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    #: The most tokens of one sequence that a step computes.
    max_chunk: int
    depth: int


def decide_sizes(model: ModelConfig, config: ServeConfig, *, on_cuda: bool) -> Sizes:
    """Decide all sizes. Raise ConfigError if max_model_len exceeds the model's limit."""
    cache, scheduling = config.cache, config.scheduler
    max_model_len = config.model.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_model_len} exceeds the limit of {model.max_position_embeddings} in config.json",
            field="max_model_len",
            needed=max_model_len,
            limit=model.max_position_embeddings,
        )
    max_num_batched_tokens = scheduling.max_num_batched_tokens or (8192 if on_cuda else 2048)
    return Sizes(
        max_model_len=max_model_len,
        block_size=cache.block_size or (64 if on_cuda else 16),
        max_num_seqs=scheduling.max_num_seqs or (256 if on_cuda else 64),
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk=max_num_batched_tokens if scheduling.enable_chunked_prefill else max_model_len,
        depth=_or_default(scheduling.async_depth, 1 if on_cuda else 0),
    )


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value
