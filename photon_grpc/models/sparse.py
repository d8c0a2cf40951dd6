"""Mixture of experts: Qwen3-MoE and Mixtral, Llama's layer with experts in place of its feed-forward block."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from photon_grpc.config.experts import ExpertSpec
from photon_grpc.kernels.moe.route import RouterForm
from photon_grpc.layers.experts import Expert, ExpertPlace, Experts, Router, SparseMLP, StackNames
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.experts import ParallelSparseMLP
from photon_grpc.layers.parallel.group import Group, LoneRank
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
    """Builds decoders in which some or all layers have experts."""

    names: ClassVar[SparseNames] = SparseNames("mlp.", "gate_proj", "up_proj", "down_proj")

    def check_shares(self) -> None:
        DecoderBuilder.check_shares(self)
        self.check_experts()

    def check_experts(self) -> None:
        """Raise ModelLoadError unless the experts can be split evenly over the ranks."""
        spec = self.config.experts
        if spec is not None:
            self.refuse_share("moe_intermediate_size", spec.intermediate_size, self.mesh.of_expert.size)
            self.refuse_share("num_experts", spec.num_experts, self.mesh.experts.count)

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
        group, numbers = self.mesh.tp, range(spec.num_experts)
        own = numbers[self.mesh.experts.of(spec.num_experts)]
        kept = (own.start, len(own)) if len(own) < len(numbers) else (0, 0)
        shared = self.shared_experts(prefix, spec)
        form = RouterForm(
            spec.top_k, spec.scoring == "softmax", spec.renormalises, spec.scale, spec.groups, spec.groups_taken, *kept,
            len(shared),
        )  # fmt: skip
        block, stacked = prefix + self.names.block, prefix + STACKED
        router_names = block + "gate.weight", stacked + "gate.weight"
        sizes = spec.num_experts, self.config.hidden_size
        router = Router(
            router_names, sizes, form, dtype=self.dtype, kernels=self.kernels, has_bias=spec.has_bias
        )  # fmt: skip
        prefixes = [f"{block}experts.{number}." for number in numbers]
        self.elsewhere.update(prefixes[number] for number in numbers if number not in own)
        names = StackNames(stacked + "experts.gate_up_proj", stacked + "experts.down_proj")
        size, of_expert = spec.intermediate_size, self.mesh.of_expert
        routed = [self.expert(prefixes[number], size, of_expert) for number in own]
        experts = Experts(routed, names, self.kernels, shared)
        experts.place = ExpertPlace(own.start, len(numbers))
        return ParallelSparseMLP(router, experts, group) if group.size > 1 else SparseMLP(router, experts)

    def shared_experts(self, prefix: str, spec: ExpertSpec) -> list[Expert]:
        """Build this rank's experts of those that every token reaches; `prefix` is the layer's.

        In a checkpoint they are one block, of which each is an equal part.
        """
        share, of_expert, count = self.mesh.experts, self.mesh.of_expert, spec.num_shared
        own = [number for number in range(count) if number % share.count == share.index]
        prefix += "mlp.shared_experts."
        if count and not own:
            self.elsewhere.add(prefix)
        size, of_all = spec.shared_size, count * of_expert.size
        return [self.expert(prefix, size, LoneRank(each * of_expert.size + of_expert.rank, of_all)) for each in own]

    def expert(self, prefix: str, size: int, group: Group) -> Expert:
        """Build a rank's part of an expert of this size."""
        merged, outputs = {self.names.gate: size, self.names.up: size}, {self.names.down: self.config.hidden_size}
        gate_up = self.column_linear(prefix, self.config.hidden_size, merged, bias=False, norm=None, group=group)
        return Expert(gate_up, self.row_part(prefix, size, outputs, group))

    def row_part(self, prefix: str, size: int, outputs: dict[str, int], group: Group) -> RowPartLinear:
        """Build a Linear whose result is this rank's part of a sum; sizes are those of the whole model."""
        method = self.method_of(prefix, outputs)
        return RowPartLinear(prefix, size, outputs, bias=False, dtype=self.dtype, method=method, group=group)


class MixtralBuilder(SparseBuilder):
    """Builder of layers whose experts have Mixtral's names."""

    names: ClassVar[SparseNames] = SparseNames("block_sparse_moe.", "w1", "w3", "w2")
