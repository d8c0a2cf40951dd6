"""The parts of a model on every rank, built without weights, so that bad sizes are refused before a process starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from photon_grpc import demo
from photon_grpc.compose.assemble import check_cache, mesh_sizes, pick_dtype
from photon_grpc.compose.speculation import check as check_speculation
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.model_dir import ModelConfig, read_model_dir
from photon_grpc.config.sizes import Sizes, decide_sizes
from photon_grpc.config.weight_bytes import format_of
from photon_grpc.kernels import TORCH
from photon_grpc.layers.parallel.group import LoneRank, mesh_of
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import build
from photon_grpc.models.decoder import Decoder


def check_split(config: ServeConfig, *, on_cuda: bool) -> None:
    """Raise ConfigError and ModelLoadError for sizes that the model or the ranks do not allow."""
    model_config = read_model_dir(config.model.model or Path(demo.TARGET))
    sizes = decide_sizes(model_config, config, on_cuda=on_cuda)
    check_speculation(config.speculation, model_config, sizes, config.parallel.pipeline_parallel_size)
    for _ in decoders_of_ranks(config, model_config, sizes):
        """Each is refused while it is built."""


def decoders_of_ranks(config: ServeConfig, model_config: ModelConfig, sizes: Sizes) -> Iterator[Decoder]:
    """Return an unallocated decoder for each kind of rank, with the cache settings checked."""
    method, split = methods(format_of(model_config, config.model)), mesh_sizes(config.parallel)
    dtype = pick_dtype(model_config, config)
    # Ranks that have parts of the same tensors are alike.
    for rank in range(0, config.parallel.num_ranks, split.tensor):
        decoder = build(
            model_config, dtype=dtype, device="cpu", kernels=TORCH, max_model_len=sizes.max_model_len,
            method=method, mesh=mesh_of(rank, split, LoneRank),
        )  # fmt: skip
        check_cache(config.cache, decoder, sizes)
        yield decoder
