"""Phi-3 and Phi-4-mini: Llama's layer, whose checkpoints have q, k and v in one tensor, and so gate and up."""

from __future__ import annotations

from photon_grpc.errors import ModelLoadError
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.group import Group
from photon_grpc.layers.parallel.linears import MergedParallelLinear
from photon_grpc.models.decoder_builder import DecoderBuilder


class Phi3Builder(DecoderBuilder):
    """Builder of layers with merged projections."""

    def qkv_outputs(self) -> dict[str, int]:
        config = self.config
        return {"qkv_proj": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim}

    def gate_up_outputs(self) -> dict[str, int]:
        return {"gate_up_proj": 2 * self.config.intermediate_size}

    def column_linear(
        self, prefix: str, in_features: int, outputs: dict[str, int], *, bias: bool, norm: RMSNorm | None,
        most: dict[str, int] | None = None, group: Group | None = None,
    ) -> Linear:  # fmt: skip
        """Build the part of a merged Linear. Raise ModelLoadError where a quantized checkpoint has packed its rows."""
        group, (name,) = group or self.mesh.tp, outputs
        if group.size == 1:
            return DecoderBuilder.column_linear(
                self, prefix, in_features, outputs, bias=bias, norm=norm, most=most, group=group
            )
        method = self.method_of(prefix, outputs)
        if not method.reads_floats:
            message = (
                f"{prefix}{name}: quantized rows of merged projections cannot be shared out over {group.size} ranks"
            )
            raise ModelLoadError(message, field=prefix + name, needed=group.size)
        parts = DecoderBuilder.qkv_outputs(self) if name == "qkv_proj" else DecoderBuilder.gate_up_outputs(self)
        shared = {"dtype": self.dtype, "method": method, "group": group}
        return MergedParallelLinear(prefix, in_features, name, parts, bias=bias, norm=norm, most=most, **shared)
