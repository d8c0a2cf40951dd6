"""Phi-3 and Phi-4-mini: Llama's layer, whose checkpoints have q, k and v in one tensor, and so gate and up."""

from __future__ import annotations

from photon_grpc.errors import ModelLoadError
from photon_grpc.models.decoder_builder import DecoderBuilder


class Phi3Builder(DecoderBuilder):
    """Builder of layers with merged projections."""

    def check_shares(self) -> None:
        """Raise ModelLoadError for several ranks: a share of a merged tensor is not a share of each projection."""
        if self.mesh.tp.size > 1:
            raise ModelLoadError(f"qkv_proj cannot be shared out over {self.mesh.tp.size} ranks", field="qkv_proj")

    def qkv_outputs(self) -> dict[str, int]:
        config = self.config
        return {"qkv_proj": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim}

    def gate_up_outputs(self) -> dict[str, int]:
        return {"gate_up_proj": 2 * self.config.intermediate_size}
