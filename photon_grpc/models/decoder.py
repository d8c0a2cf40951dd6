"""The decoder-only transformer of all families, which differ in the parts passed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from photon_grpc.core.kv import KVGroup, kv_groups, place
from photon_grpc.kernels import AttentionMetadata, Kernels
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.page_scales import PageScales
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import GroupContext, StepContext
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.experts import Router
from photon_grpc.layers.form import LayerForm
from photon_grpc.layers.fused_chain import FusedChain
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.group import GroupOfOne
from photon_grpc.layers.parallel.stages import Stages
from photon_grpc.layers.parameter_owner import ParameterOwner


class LayerPlace(NamedTuple):
    """Layers that share a block table, pages and an AttentionSpec: a step chooses their kernels once."""

    #: The number of their KVGroup, and of their section there.
    group: int
    section: int
    spec: AttentionSpec


class FeedForward(Protocol):
    """The part of a layer after attention: an MLP or experts."""

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Compute [T, hidden] -> [T, hidden]."""

    def leaves(self) -> tuple[ParameterOwner, ...]: ...


class DecoderLayer:
    """Pre-norm attention and feed-forward.

    The residual stream travels beside the hidden state; the next norm adds the two.
    """

    #: The chain of its fused kernels.
    chain: FusedChain | None = None

    def __init__(
        self, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, mlp: FeedForward
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    @property
    def norms(self) -> tuple[RMSNorm, ...]:
        """The norms, in the order in which they are computed."""
        return self.input_norm, self.post_attention_norm

    @property
    def form(self) -> LayerForm:
        attention, heads = self.attention, self.attention.qk_norm
        return LayerForm(
            layer=type(self),
            norms=tuple(type(norm) for norm in self.norms),
            attention=type(attention),
            qk_norms=() if heads is None else (type(heads.q), type(heads.k)),
            rope=type(attention.rotary),
            ffn=type(self.mlp),
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map x, residual [T, hidden] to those of the next layer.

        Their sum is the residual stream; it is x alone if residual is None.
        """
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, ctx)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x, ctx), residual

    def leaves(self) -> Iterator[ParameterOwner]:
        yield self.input_norm
        yield from self.attention.leaves()
        yield self.post_attention_norm
        yield from self.mlp.leaves()


class Observer(Protocol):
    """Sees the residual stream before every layer of a step."""

    def before(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext) -> None:
        """Look at the input of layer number `layer`, which may change the tensors in place."""


class NoObserver:
    """An observer that does nothing."""

    def before(self, layer: int, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext) -> None:
        """Do nothing."""


class Decoder:
    """A decoder without memory for its weights: `load` or `dummy` of `models/weights.py` fills them."""

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: LMHead,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        stages: Stages | None = None,
    ) -> None:
        #: Of which `layers` are one.
        self.stages = stages or Stages(GroupOfOne())
        #: The number of the first layer in the model.
        self.first_layer = 0
        #: What names of tensors that other ranks have begin with.
        self.elsewhere: frozenset[str] = frozenset()
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        #: Positions stay below this.
        self.max_model_len = max_model_len
        self.kv_groups: tuple[KVGroup, ...] = kv_groups([layer.attention.kv for layer in self.layers])
        #: Of all layers, in the order of the groups; the layers' `place` is a number here.
        self.places = self._place_layers()
        #: (place, chain of some of its layers).
        self._chains = tuple(
            dict.fromkeys((layer.attention.place, layer.chain) for layer in self.layers if layer.chain is not None)
        )
        #: Of each place: the constants of its layers' pages in the order of their rows, None if they have none.
        self.kv_scales = tuple(self._scales_of(number) for number in range(len(self.places)))
        self.vocab_size = embedding.weight.shape[0]
        self.observer: Observer = NoObserver()
        #: Tied weights count once.
        self.num_parameters = sum(leaf.num_parameters for leaf in self.leaves())

    def _place_layers(self) -> tuple[LayerPlace, ...]:
        """Assign a place to every layer; return all places."""
        found: dict[LayerPlace, list[Attention]] = {}
        for number, layer in enumerate(self.layers):
            group, section, layer.attention.layer = place(self.kv_groups, number)
            found.setdefault(LayerPlace(group, section, layer.attention.spec), []).append(layer.attention)
        places = tuple(sorted(found, key=lambda each: (each.group, each.section)))
        for number, each in enumerate(places):
            for attention in found[each]:
                attention.place = number
        return places

    @property
    def saturated(self) -> torch.Tensor | None:
        """The count of numbers beyond the range of pages of 8 bits; None if there are no such pages."""
        scales = next((layer.attention.scales for layer in self.layers if layer.attention.scales is not None), None)
        return None if scales is None else scales.saturated

    @property
    def expert_tally(self) -> torch.Tensor | None:
        """The counts of all routers (`kernels/moe/route.py`); None if there are no experts."""
        return next((leaf.tally for leaf in self.leaves() if isinstance(leaf, Router)), None)

    def forget_counts(self) -> None:
        """Reset the counts of steps before the first request."""
        for counted in (self.saturated, self.expert_tally):
            if counted is not None:
                counted.zero_()

    def _scales_of(self, place: int) -> tuple[PageScales, ...] | None:
        group, section, _ = self.places[place]
        layers = self.kv_groups[group].sections[section].layers
        scales = [self.layers[layer].attention.scales for layer in layers]
        found = tuple(each for each in scales if each is not None)
        return found if len(found) == len(scales) else None

    def group_context(
        self, place: int, pages: torch.Tensor, slot_mapping: torch.Tensor, meta: AttentionMetadata, *,
        history_is_settled: bool = False,
    ) -> GroupContext:  # fmt: skip
        """Return the context of the layers at `places[place]` for the T tokens of `slot_mapping`, kernels chosen.

        `pages` are those of their section; `meta` has the scale of their AttentionSpec and the window of their group.

        `history_is_settled`: of the keys of this step a row attends only to those of its own queries (to none of a
        prefix that another row computes in the same step), so older keys may be read before this step's are written.
        """
        num_tokens, spec = slot_mapping.shape[0], self.places[place].spec
        chain = next((chain for of, chain in self._chains if of == place and chain.takes(num_tokens)), None)
        dependent = chain and chain.dependent(history_is_settled)
        if self.kv_scales[place] is not None:
            meta = replace(meta, kv_scales=self.kv_scales[place])
        attention = self.kernels.attention(spec, meta, pages, slot_mapping, dependent)
        return GroupContext(pages, slot_mapping, attention)

    def forward(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Compute token_ids [T] int32 or int64 -> hidden [T, hidden_size] after the final norm.

        Writes the T tokens' keys and values to the pages of ctx.kv. Allocates by the step's shape alone and can be
        captured. Clears `ctx.memo`.
        """
        hidden = self.stages(self.embedding(token_ids, ctx), partial(self._stage, ctx))
        # Free the buffers before the head runs; another pass over the same context makes new ones.
        ctx.memo.clear()
        return hidden

    def _stage(self, ctx: StepContext, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this stage's layers; after the last stage, its norm."""
        residual: torch.Tensor | None = None
        for number, layer in enumerate(self.layers):
            self.observer.before(number, x, residual, ctx)
            x, residual = layer(x, residual, ctx)
        if not self.stages.is_last:
            return x if residual is None else x + residual
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows of `forward`: hidden [R, hidden_size] -> float32 [R, vocab_size]."""
        return self.head.logits(hidden)

    def sample(self, hidden: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Sample an id for each row of `hidden`, int64 [R], as `kernels/sampling/sample.py` does from their logits."""
        return self.head.sample(hidden, metadata)

    def leaves(self) -> Iterator[ParameterOwner]:
        """Return everything that owns weights, in loading order (a tied head after the embedding)."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.leaves()
        yield self.norm
        yield self.head
