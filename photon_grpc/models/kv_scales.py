"""The constants of pages of 8 bits: from a calibration file, else from the checkpoint, else 1.

Checkpoints have them under one of several names, one number for a layer's keys and one for its values, or one for each
head: a number of the page times it is the key.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from photon_grpc.config.checkpoint import Checkpoint, read_checkpoint
from photon_grpc.config.kv_calibration import read_calibration, source_of_scales
from photon_grpc.config.model_dir import ModelConfig
from photon_grpc.errors import ModelLoadError
from photon_grpc.models.decoder import Decoder

#: Behind "model.layers.N.self_attn.": of keys and of values, as compressed-tensors, ModelOpt, AutoFP8 and older
#: compressed-tensors name them.
NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)


class KVScales(NamedTuple):
    """The constants of a model's pages.

    numbers: float32 [layers, 2, Hkv]. offsets: float32 [layers, Hkv, D], of keys; None for zeros. source: where they
    are from; "" for nowhere.
    """

    numbers: torch.Tensor
    source: str
    offsets: torch.Tensor | None = None

    @property
    def digest(self) -> str:
        parts = [self.numbers] if self.offsets is None else [self.numbers, self.offsets]
        return hashlib.sha256(b"".join(part.numpy().astype("<f4").tobytes() for part in parts)).hexdigest()[:8]


def find_kv_scales(config: ModelConfig, file: str, *, has_weights: bool = True) -> KVScales:
    """Return the constants for a model's pages of 8 bits from where `source_of_scales` says that they are.

    Raise ModelLoadError and ConfigError for scales that are malformed or of another model.
    """
    source = source_of_scales(config.path, file, has_weights=has_weights)
    if source is None:
        return KVScales(torch.ones(config.num_layers, 2, config.num_kv_heads), "")
    if source == config.path:
        return KVScales(_of_checkpoint(config, read_checkpoint(config.path)), "the checkpoint")
    shape = config.num_layers, config.num_kv_heads, config.head_dim
    found = read_calibration(source, config.revision, shape)
    offsets = torch.tensor(found.key_offsets) if found.key_offsets else None
    return KVScales(torch.tensor((found.keys, found.values)).transpose(0, 1).contiguous(), str(source), offsets)


def set_kv_scales(decoder: Decoder, found: KVScales) -> None:
    """Set the constants of the decoder's pages of 8 bits."""
    offsets = [None] * len(found.numbers) if found.offsets is None else found.offsets.to(decoder.device)
    own = slice(decoder.first_layer, decoder.first_layer + len(decoder.layers))
    of_layers = zip(decoder.layers, found.numbers[own].to(decoder.device), offsets[own], strict=True)
    for layer, numbers, offset in of_layers:
        if layer.attention.scales is not None:
            heads = layer.attention.kv_heads
            layer.attention.scales.set(numbers[:, heads], None if offset is None else offset[heads])


def _of_checkpoint(config: ModelConfig, checkpoint: Checkpoint) -> torch.Tensor:
    layers = []
    for layer in range(config.num_layers):
        prefix = f"{config.tensor_prefix}model.layers.{layer}.self_attn."
        names = next((pair for pair in NAMES if any(prefix + name in checkpoint.tensors for name in pair)), NAMES[0])
        layers.append(torch.stack([_scale(config, checkpoint, prefix + name) for name in names]))
    return torch.stack(layers)


def _scale(config: ModelConfig, checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return float32 [Hkv]."""
    entry = checkpoint.tensors.get(name)
    if entry is None:
        raise ModelLoadError(f"{name} is missing, though other layers have scales of an FP8 KV cache", field=name)
    try:
        with safe_open(config.path / entry.file, framework="pt", device="cpu") as file:
            scale: torch.Tensor = file.get_tensor(name).flatten()
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{entry.file}: {name} cannot be read ({error})", field=name) from None
    if not scale.is_floating_point() or scale.numel() not in (1, config.num_kv_heads):
        problem = f"must be a number, or one for each of {config.num_kv_heads} heads"
        raise ModelLoadError(f"{entry.file}: {name} {problem}", field=name)
    scale = scale.float().expand(config.num_kv_heads)
    if not (scale.isfinite().all() and (scale > 0).all()):
        raise ModelLoadError(f"{entry.file}: {name} must be finite and above 0", field=name)
    return scale
