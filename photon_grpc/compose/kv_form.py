"""The form of keys and values in the KV cache, by --kv-cache-dtype and --kv-calibration."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.core.kv import KVPlan
from photon_grpc.errors import ConfigError
from photon_grpc.kernels import TORCH, Kernels
from photon_grpc.kernels.dtypes import name_of
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.kv_scales import KVScales, find_kv_scales, set_kv_scales

_LOG = logging.getLogger(__name__)

#: The least compute capability whose processors convert e4m3.
_CAPABILITY = 8, 9


@dataclass(frozen=True, slots=True)
class KVForm:
    """The format of pages: that of the layers (both None), or 8 bits with scales."""

    dtype: torch.dtype | None = None
    scales: KVScales | None = None

    @property
    def name(self) -> str:
        """The format's name in the numerics version; "" for that of the layers."""
        return "" if self.scales is None else f"{str(PAGE_DTYPE).removeprefix('torch.')}, scales {self.scales.digest}"

    def set_scales(self, decoder: Decoder) -> None:
        if self.scales is not None:
            set_kv_scales(decoder, self.scales)

    def log_savings(self, plan: KVPlan, num_blocks: int, dtype: torch.dtype) -> None:
        """Log how much memory the format saves, and warn if it has no scales."""
        if self.scales is None:
            return
        share = dtype.itemsize // PAGE_DTYPE.itemsize
        _LOG.info(
            "KV cache: float8_e4m3fn, scales of %s; %s blocks of %d tokens, each 1/%d of the bytes of %s",
            self.scales.source or "1", f"{num_blocks:,}", plan.block_size, share, name_of(dtype),
        )  # fmt: skip
        if not self.scales.source:
            _LOG.warning(
                "the KV cache has no scales: keys and values beyond 448 are clipped, and counted in "
                "photon_kv_saturated_values_total; photon-grpc calibrate finds scales"
            )


def choose_kv_form(
    config: ServeConfig, model_config: ModelConfig, device: torch.device, kernels: Kernels
) -> KVForm:  # fmt: skip
    """Return the format of pages. Raise ConfigError if the device or a flag forbids it, or for bad scales."""
    cache = config.cache
    if cache.kv_cache_dtype == "auto":
        if cache.kv_calibration:
            message = "--kv-calibration is for --kv-cache-dtype fp8, which is not set"
            raise ConfigError(message, field="kv_calibration")
        return KVForm()
    if model_config.latent:
        message = f"--kv-cache-dtype fp8 cannot hold the latents of {model_config.architecture}: leave it out"
        raise ConfigError(message, field="kv_cache_dtype")
    if device.type == "cuda":
        _check_device(device, kernels)
    has_weights = config.model.load_format != "dummy"
    return KVForm(PAGE_DTYPE, find_kv_scales(model_config, cache.kv_calibration, has_weights=has_weights))


def _check_device(device: torch.device, kernels: Kernels) -> None:
    if kernels is TORCH:
        message = "--kv-cache-dtype fp8 on CUDA needs the Triton kernels; leave --kernels torch out"
        raise ConfigError(message, field="kv_cache_dtype")
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, _CAPABILITY))
        message = f"--kv-cache-dtype fp8 needs a GPU of compute capability {least}, this one has {found}"
        raise ConfigError(message, field="kv_cache_dtype")
