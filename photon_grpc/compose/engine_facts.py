"""The facts of a loaded engine: its limits, its device, and what decides the bits of its results."""

from __future__ import annotations

import logging

import torch

from photon_grpc.compose.kv_form import KVForm
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.config.sizes import Sizes
from photon_grpc.config.weight_bytes import format_of, weight_bytes_by
from photon_grpc.core.frames import Facts
from photon_grpc.kernels import TORCH
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.fused import num_fused
from photon_grpc.runner.library import splits_k
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.numerics import numerics

_LOG = logging.getLogger(__name__)


def facts_of(
    model_config: ModelConfig,
    decoder: Decoder,
    runner: ModelRunner,
    config: ServeConfig,
    sizes: Sizes,
    kv_form: KVForm,
) -> Facts:
    scheduling = config.scheduler
    weight_format = format_of(model_config, config.model)
    return Facts(
        max_model_len=sizes.max_model_len,
        vocab_size=model_config.vocab_size,
        kv=runner.kv,
        num_blocks=runner.num_blocks,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_queue_size=scheduling.max_queue_size,
        max_queued_tokens=scheduling.max_queued_tokens,
        device=_device_name(decoder.device, config.parallel.num_ranks),
        dtype=name_of(decoder.dtype),
        revision=model_config.revision,
        kernels="torch" if decoder.kernels is TORCH else _triton(num_fused(decoder), len(decoder.layers)),
        quantization="" if weight_format is None else weight_format.name,
        numerics=numerics(
            _mode(config, decoder.device),
            decoder.kernels,
            decoder.device,
            decoder.dtype,
            weight_format,
            sizes.block_size,
            is_long=model_config.has_long_rotary(sizes.max_model_len),
            kv_form=kv_form.name,
            cuts=config.parallel.cuts,
        ),
        weight_bytes=weight_bytes_by(model_config, config.model, config.cache.kv_cache_dtype),
    )


def _device_name(device: torch.device, num_ranks: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return name if num_ranks == 1 else f"{num_ranks} x {name}"


def _mode(config: ServeConfig, device: torch.device) -> str:
    """Return the effective --numerics: "fast" if the library splits K."""
    mode = config.device.numerics
    if mode == "strict" and splits_k(device):
        _LOG.warning(
            "numerics are fast: this process multiplied on the GPU before the model was loaded, and the matrix library "
            "kept a workspace. Load the model first, or set CUBLAS_WORKSPACE_CONFIG=:0:0"
        )
        return "fast"
    return mode


def _triton(num_fused: int, num_layers: int) -> str:
    """Return the description of the kernels that callers see."""
    if not num_fused:
        return "triton"
    return "triton, fused" if num_fused == num_layers else f"triton, fused {num_fused} of {num_layers}"
