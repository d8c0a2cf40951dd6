"""The decoder of a ModelConfig."""

from __future__ import annotations

import torch

from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE
from photon_grpc.layers.parallel.group import Mesh
from photon_grpc.layers.quantization.methods import Method, methods
from photon_grpc.layers.rotary import rotary_embedding
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.decoder_builder import DecoderBuilder
from photon_grpc.models.deepseek import DeepseekBuilder
from photon_grpc.models.gemma3 import Gemma3Builder
from photon_grpc.models.olmo2 import Olmo2Builder
from photon_grpc.models.phi3 import Phi3Builder
from photon_grpc.models.sparse import MixtralBuilder, SparseBuilder

#: Architecture -> its builder, for those that have one of their own.
BUILDERS: dict[str, type[DecoderBuilder]] = {
    "DeepseekV2ForCausalLM": DeepseekBuilder,
    "DeepseekV3ForCausalLM": DeepseekBuilder,
    "Gemma3ForCausalLM": Gemma3Builder,
    "Gemma3ForConditionalGeneration": Gemma3Builder,
    "MixtralForCausalLM": MixtralBuilder,
    "Olmo2ForCausalLM": Olmo2Builder,
    "Phi3ForCausalLM": Phi3Builder,
    "Qwen3MoeForCausalLM": SparseBuilder,
}


def build(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    max_model_len: int,
    method: Method | None = None,
    mesh: Mesh | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    """Return the model's decoder for positions below `max_model_len`, its weights not yet allocated.

    It takes memory for the rotary tables only. `method` is Unquantized for all by default. With a `mesh` it is this
    rank's part. `kv_dtype` is that of pages: `dtype` by default, else PAGE_DTYPE, with constants of 1. Raise
    ModelLoadError if a size cannot be split over the ranks, or does not suit its method.
    """
    device, method, mesh = torch.device(device), method or methods(None), mesh or Mesh()
    tables = {"device": device, "kernels": kernels}
    rotaries = {spec: rotary_embedding(spec, config.head_dim, max_model_len, **tables) for spec in set(config.ropes)}
    kind = BUILDERS.get(config.architecture, DecoderBuilder)
    saturated = torch.zeros(1, dtype=torch.int64, device=device) if kv_dtype == PAGE_DTYPE else None
    builder = kind(config, dtype, device, kernels, method, rotaries, max_model_len, mesh, saturated)
    builder.check_shares()
    return builder.decoder()
