"""Feed-forward by experts: a router gives each token a few of them, whose results are added by weight.

    y = Σ_j w_j · down_e(silu(gate_e(x)) · up_e(x)),  e = e_j of x,  j = 1 … top_k

The sum is taken in float32 in the order of j, the token's own order of preference, so a token has the same bits in any
company. Padding reaches no expert. On CUDA the experts' weights are stacked, and one kernel multiplies for all experts;
elsewhere each expert is computed on its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from photon_grpc.kernels import Kernels
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.linear.quantize import QuantizedRows
from photon_grpc.kernels.moe import experts as stacked_experts
from photon_grpc.kernels.moe import route
from photon_grpc.kernels.moe.route import RouterForm, Routing, StreamNorm
from photon_grpc.kernels.moe.stacks import Stacks, stacked
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parameter_owner import OneWeight, ParameterOwner, Part, Target
from photon_grpc.layers.workspace import Workspace

#: Tokens that are computed at once.
MOST_TOKENS = 4096


class Router(OneWeight):
    """Choice of each token's experts, in float32.

    The weight is [num_experts, hidden]; `names`: where experts have tensors of their own, and where they are stacked.
    """

    def __init__(
        self,
        names: tuple[str, str],
        sizes: tuple[int, int],
        form: RouterForm,
        *,
        dtype: torch.dtype,
        kernels: Kernels,
        has_bias: bool = False,
    ) -> None:
        super().__init__(names[0], sizes, dtype)
        self.names = names
        self.form = form
        #: Shared by the routers of a decoder.
        self.tally: torch.Tensor | None = None
        #: Of the choice, float32; None: there is none.
        self.bias = torch.empty(sizes[0], device="meta") if has_bias else None
        self._route = route.launch if kernels.stacks_experts else route.reference

    def __call__(self, x: torch.Tensor, ctx: StepContext, block: int = 0) -> Routing:
        """Route; `block`: the pairs of an entry of the work list, 0: as many as `route.py` chooses."""
        return self._route(x, self.weight, self.form, ctx.num_real, self.tally, self.bias, block=block)

    def behind(
        self, norm: RMSNorm, stream: ResidualStream, ctx: StepContext, block: int = 0,
        rows: QuantizedRows | None = None,
    ) -> tuple[torch.Tensor, Routing]:  # fmt: skip
        """Return the stream normalised and its routing, by the kernels of stacks; fill rows with it quantized."""
        normed = StreamNorm(stream.partial, norm.weight, norm.eps, torch.empty_like(stream.h))
        routed = route.launch(
            stream.h, self.weight, self.form, ctx.num_real, self.tally, self.bias, block=block, norm=normed, rows=rows
        )  # fmt: skip
        return normed.y, routed

    @property
    def num_parameters(self) -> int:
        return super().num_parameters + (0 if self.bias is None else self.bias.numel())

    def allocate(self, device: torch.device) -> None:
        super().allocate(device)
        if self.bias is not None:
            self.bias = torch.empty_like(self.bias, device=device)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        if self.bias is not None:
            yield Target(self.name.removesuffix("weight") + "e_score_correction_bias", self.bias)

    def after_load(self) -> None:
        if self.weight.device.type == "cpu":
            self.weight = self.weight.double()

    def read_as(self, names: Collection[str]) -> None:
        """Take the name that is among those of a checkpoint."""
        self.name = next((name for name in self.names if name in names), self.names[0])


class Expert(NamedTuple):
    """The projections of one expert."""

    gate_up: Linear
    down: Linear


class StackNames(NamedTuple):
    """The names in a checkpoint of a layer's stacked experts: [E, 2 · I, H], gate first, and [E, H, I]."""

    gate_up: str
    down: str


class ExpertPlace(NamedTuple):
    """The number of a rank's first expert, and how many all ranks have."""

    first: int
    count: int


class Experts:
    """The experts of a layer that this rank has, each with tensors of its own in a checkpoint, or all stacked.

    Behind those that a router chooses come those that every token reaches, `shared`, which are never stacked there.
    """

    def __init__(
        self, routed: Sequence[Expert], names: StackNames, kernels: Kernels, shared: Sequence[Expert] = ()
    ) -> None:
        self.experts = (*routed, *shared)
        self.names = names
        self._num_routed = len(routed)
        #: Among those of the layer that a router chooses; set by the builder.
        self.place = ExpertPlace(0, len(routed))
        #: Whether the checkpoint has them stacked.
        self.reads_stacks = False
        #: The weights of all experts; None where each is computed on its own.
        self.stacks: Stacks | None = None
        self._swiglu = kernels.swiglu
        self._stacks = kernels.stacks_experts

    def __call__(self, x: torch.Tensor, routing: Routing, ctx: StepContext) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]; rows of padding are zeros."""
        if self.stacks is not None:
            return stacked_experts.launch(x, routing, self.stacks)
        parts = self._computed(x, routing, ctx)
        # Expert -1 of padding has weight 0.
        y = parts[:, 0] * routing.weights[:, :1]
        for place in range(1, parts.shape[1]):
            y.addcmul_(parts[:, place], routing.weights[:, place : place + 1])
        return y.to(x.dtype)

    def add_to(
        self, stream: ResidualStream, x: torch.Tensor, routing: Routing, rows: QuantizedRows | None = None
    ) -> None:
        """Add the result for x to the stream by the kernels of stacks; rows: x quantized, if it is already."""
        assert self.stacks is not None
        stacked_experts.launch(x, routing, self.stacks, stream, rows)

    def _computed(self, x: torch.Tensor, routing: Routing, ctx: StepContext) -> torch.Tensor:
        """Return the results of each token's experts, float32 [T, top_k, hidden]."""
        top_k = routing.experts.shape[1]
        parts = x.new_zeros((x.shape[0] * top_k, x.shape[1]), dtype=torch.float32)
        chosen, pairs = routing.experts.flatten().sort(stable=True)
        numbers, counts = chosen.unique_consecutive(return_counts=True)
        for number, of in zip(numbers.tolist(), pairs.split(counts.tolist()), strict=True):
            if number >= 0:
                gate_up, down = self.experts[number]
                parts[of] = down(self._swiglu(gate_up(x[of // top_k], ctx)), ctx).float()
        return parts.view(-1, top_k, x.shape[1])

    @property
    def num_parameters(self) -> int:
        return sum(linear.num_parameters for linear in self.linears())

    @property
    def num_bytes(self) -> int:
        return sum(linear.method.num_bytes(linear) for linear in self.linears())

    def linears(self) -> Iterator[Linear]:
        for expert in self.experts:
            yield from expert

    def allocate(self, device: torch.device) -> None:
        for linear in self.linears():
            linear.allocate(device)

    def targets(self) -> Iterator[Target]:
        if not self.reads_stacks:
            for linear in self.linears():
                yield from linear.targets()
            return
        for number, expert in enumerate(self.experts[: self._num_routed]):
            for name, linear in zip(self.names, expert, strict=True):
                yield from _targets_in_stack(name, linear, (self.place.first + number, self.place.count))
        for gate_up, down in self.experts[self._num_routed :]:
            yield from gate_up.targets()
            yield from down.targets()

    def after_load(self) -> None:
        for linear in self.linears():
            linear.after_load()
        if self._stacks:
            self.stacks = _stack(self.experts)

    def read_as(self, names: Collection[str]) -> None:
        """Read stacks if they are among the names of a checkpoint and all weights are floats."""
        has_floats = all(linear.method.reads_floats for linear in self.linears())
        self.reads_stacks = has_floats and any(name in names for name in self.names)


def _targets_in_stack(name: str, linear: Linear, place: tuple[int, int]) -> Iterator[Target]:
    """Return the places of an expert's weight in a stack of all, whose outputs follow each other there.

    `place`: the expert's number, and that of experts.
    """
    number, num_experts = place
    parts = []
    for output, rows in linear.slices():
        weight = linear.weight[rows]
        parts.append((weight, linear.part(output, weight.shape) or Part((slice(None),) * 2, tuple(weight.shape))))
    num_rows, begin = sum(part.whole[0] for _, part in parts), 0
    for weight, part in parts:
        first, last, _ = part.slices[0].indices(part.whole[0])
        rows = slice(begin + first, begin + last)
        yield Target(name, weight, part=Part((number, rows, part.slices[1]), (num_experts, num_rows, part.whole[1])))
        begin += part.whole[0]


def _stack(experts: Sequence[Expert]) -> Stacks | None:
    """Return the weights stacked, each Linear's own a view; None if a Linear's can not be read any more."""
    gate_up = stacked([expert.gate_up.weight for expert in experts])
    down = stacked([expert.down.weight for expert in experts])
    if gate_up is None or down is None:
        return None
    for number, expert in enumerate(experts):
        expert.gate_up.weight, expert.down.weight = gate_up.at(number), down.at(number)
    return Stacks(gate_up, down)


class SparseMLP:
    """A feed-forward block of experts."""

    def __init__(self, router: Router, experts: Experts) -> None:
        self.router = router
        self.experts = experts

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]."""
        found = []
        for begin, some in self._parts(ctx, x.shape[0]):
            part = x[begin : begin + MOST_TOKENS]
            found.append(self.experts(part, self.router(part, some, self.block_of(part)), some))
        return torch.cat(found) if len(found) != 1 else found[0]

    def add_to(self, work: Workspace, norm: RMSNorm, ctx: StepContext) -> None:
        """Add the result for the normalised residual stream to it, rounded first."""
        if self.experts.stacks is None:
            work.h.add_(self(norm(work.h), ctx))
            return work.outdated()
        h, partial = work.stream()
        for begin, some in self._parts(ctx, h.shape[0]):
            of = slice(begin, begin + MOST_TOKENS)
            stream = ResidualStream(h[of], partial[of])
            block = self.block_of(stream.h)
            rows = stacked_experts.memory_for(stream.h, block, self.experts.stacks)
            self.experts.add_to(stream, *self.router.behind(norm, stream, some, block, rows), rows)
        return None

    def block_of(self, x: torch.Tensor) -> int:
        """Return the pairs of an entry of the work list that x is multiplied by, as `Router` takes it."""
        num_pairs = x.shape[0] * (self.router.form.top_k + self.router.form.num_shared)
        return stacked_experts.block_of(num_pairs, x.dtype, self.experts.stacks)

    def _parts(self, ctx: StepContext, num_tokens: int) -> Iterator[tuple[int, StepContext]]:
        """Return where each part of a step begins, and its context: results of all experts lie in float32."""
        for begin in range(0, num_tokens, MOST_TOKENS):
            is_first = not begin or ctx.num_real is None
            yield begin, ctx if is_first else replace(ctx, num_real=ctx.num_real - begin)

    def leaves(self) -> tuple[ParameterOwner, ...]:
        return (self.router, self.experts)
