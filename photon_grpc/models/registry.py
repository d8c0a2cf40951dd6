"""Which function builds which architecture."""

from __future__ import annotations

from collections.abc import Callable

import torch

from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import Kernels
from photon_grpc.layers.linear import QuantMethod, Unquantized
from photon_grpc.layers.rotary import RotaryEmbedding
from photon_grpc.models.builder import DecoderBuilder
from photon_grpc.models.decoder import Decoder
from photon_grpc.models.llama import llama
from photon_grpc.models.qwen2 import qwen2
from photon_grpc.models.qwen3 import qwen3

#: The names of `architectures` in config.json; `config/model_dir.py` knows the same ones.
BUILDERS: dict[str, Callable[[DecoderBuilder], Decoder]] = {
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}


def build(
    card: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    max_model_len: int,
    method: QuantMethod | None = None,
) -> Decoder:
    """The card's decoder for positions below `max_model_len`, its weights not yet allocated (see `models/weights.py`).

    Takes memory for the rotary tables only. Raises ModelLoadError for an unknown architecture.
    """
    if card.architecture not in BUILDERS:
        raise ModelLoadError(
            f"architecture {card.architecture} is not supported; known are {', '.join(BUILDERS)}", field="architectures"
        )
    device = torch.device(device)
    rotary = RotaryEmbedding(card.rope, card.head_dim, max_model_len, device=device, kernels=kernels)
    return BUILDERS[card.architecture](
        DecoderBuilder(card, dtype, device, kernels, method or Unquantized(), rotary, max_model_len)
    )
