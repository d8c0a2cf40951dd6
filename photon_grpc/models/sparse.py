"""Mixture of experts: Qwen3-MoE and Mixtral, Llama's layer with experts in place of its feed-forward block."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels.moe.route import RouterForm
from photon_grpc.layers.experts import Expert, Experts, Router, SparseMLP, StackNames
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.experts import ParallelSparseMLP
from photon_grpc.layers.parallel.linears import RowPartLinear
from photon_grpc.models.decoder import Decoder, FeedForward
from photon_grpc.models.decoder_builder import DecoderBuilder


class SparseNames(NamedTuple):
    """The names in a checkpoint of a sparse block and of each expert's projections."""

    block: str
    gate: str
    up: str
    down: str


#: The names of a block whose experts are stacked.
STACKED = "mlp."


class SparseBuilder(DecoderBuilder):
    """Builder of layers with experts, in those layers that have them."""

    names: ClassVar[SparseNames] = SparseNames("mlp.", "gate_proj", "up_proj", "down_proj")

    def check_shares(self) -> None:
        DecoderBuilder.check_shares(self)
        size, num_ranks = self.config.experts.intermediate_size if self.config.experts else 0, self.mesh.tp.size
        if size % num_ranks:
            raise ModelLoadError(
                f"moe_intermediate_size {size} cannot be shared out over {num_ranks} ranks (--tensor-parallel-size)",
                field="moe_intermediate_size",
                needed=num_ranks,
                limit=size,
            )

    def decoder(self) -> Decoder:
        decoder = super().decoder()
        tally = torch.zeros(4, dtype=torch.int64, device=self.device)
        for leaf in decoder.leaves():
            if isinstance(leaf, Router):
                leaf.tally = tally
        return decoder

    def feed_forward(self, layer: int, prefix: str, norm: RMSNorm | None) -> FeedForward:
        spec = self.config.experts
        if spec is None or not spec.layers[layer]:
            return self.gated_mlp(prefix + STACKED, norm)
        group = self.mesh.tp
        form = RouterForm(spec.top_k, spec.scoring == "softmax", spec.renormalises, spec.scale)
        block, stacked = prefix + self.names.block, prefix + STACKED
        router_names = block + "gate.weight", stacked + "gate.weight"
        sizes = spec.num_experts, self.config.hidden_size
        router = Router(router_names, sizes, form, dtype=self.dtype, kernels=self.kernels)
        experts = [self.expert(f"{block}experts.{number}.") for number in range(spec.num_experts)]
        names = StackNames(stacked + "experts.gate_up_proj", stacked + "experts.down_proj")
        block_of = Experts(experts, names, self.kernels)
        if group.size > 1:
            return ParallelSparseMLP(router, block_of, group)
        return SparseMLP(router, block_of, self.shared(prefix))

    def shared(self, prefix: str) -> GatedMLP | None:
        """Build what every token reaches beside its experts; None: there is nothing. `prefix` is the layer's."""
        return None

    def expert(self, prefix: str) -> Expert:
        spec, hidden = self.config.experts, self.config.hidden_size
        size = spec.intermediate_size if spec else 0
        merged, outputs = {self.names.gate: size, self.names.up: size}, {self.names.down: hidden}
        return Expert(
            self.column_linear(prefix, hidden, merged, bias=False, norm=None),
            RowPartLinear(
                prefix, size, outputs, bias=False, dtype=self.dtype, method=self.method_of(prefix, outputs),
                group=self.mesh.tp,
            ),
        )  # fmt: skip


class MixtralBuilder(SparseBuilder):
    """Builder of layers whose experts have Mixtral's names."""

    names: ClassVar[SparseNames] = SparseNames("block_sparse_moe.", "w1", "w3", "w2")
