"""The decoder-only transformer that all families are: what differs between them is handed in as parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from photon_grpc.core.kv import KVGroup, kv_groups, place
from photon_grpc.kernels import AttentionMetadata, DependentChain, Kernels
from photon_grpc.kernels.sampling.draw import SamplingMetadata
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import GroupContext, StepContext
from photon_grpc.layers.embedding import Embedding, LMHead
from photon_grpc.layers.leaf import Leaf
from photon_grpc.layers.mlp import GatedMLP
from photon_grpc.layers.norm import RMSNorm


class DecoderLayer:
    """Pre-norm attention and feed-forward. The residual stream travels beside the hidden state, added inside the next norm."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, mlp: GatedMLP) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, ctx: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] is what the layer before added last, residual everything before that; None in the first layer."""
        if residual is None:
            x, residual = self.input_norm(x), x
        else:
            x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, ctx)
        x, residual = self.post_attention_norm.add(x, residual)
        return self.mlp(x), residual

    def leaves(self) -> Iterator[Leaf]:
        yield self.input_norm
        yield from self.attention.leaves()
        yield self.post_attention_norm
        yield from self.mlp.leaves()


class Decoder:
    """Born without memory for its weights: `load` or `dummy` of `models/weights.py` allocates and fills them."""

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
    ) -> None:
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
        for number, layer in enumerate(self.layers):
            layer.attention.group, layer.attention.plane = place(self.kv_groups, number)
        self.vocab_size = embedding.weight.shape[0]
        #: Factor of q · k in every layer.
        self.attention_scale = self.kv_groups[0].format.width ** -0.5
        #: Tied weights count once.
        self.num_parameters = sum(target.tensor.numel() for leaf in self.leaves() for target in leaf.targets())

    def group_context(
        self, pages: torch.Tensor, slot_mapping: torch.Tensor, meta: AttentionMetadata, *,
        history_is_settled: bool = False,
    ) -> GroupContext:  # fmt: skip
        """What `forward` is given for one KVGroup and the T tokens of `slot_mapping`; the kernels that attend are chosen here.

        `history_is_settled`: no row attends a key of this step but its own newest one (of a prefix that another row is only now computing,
        say): older keys may be read before this step's are written.
        """
        chain = self._chain(slot_mapping.shape[0], history_is_settled)
        num_heads = self.layers[0].attention.num_heads
        return GroupContext(pages, slot_mapping, self.kernels.attention(meta, pages, slot_mapping, num_heads, chain))

    def _chain(self, num_tokens: int, history_is_settled: bool) -> DependentChain | None:
        """That of a step's kernels; None where each waits for the one before."""
        return None

    def forward(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """token_ids [T] int64 -> hidden [T, hidden_size] behind the final norm. Writes the T tokens' keys and values to the pages of ctx.kv."""
        x: torch.Tensor = self.embedding(token_ids)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, ctx)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], rows of what `forward` gave -> float32 [R, vocab_size]."""
        return self.head(hidden)

    def draw(self, hidden: torch.Tensor, chances: SamplingMetadata) -> torch.Tensor:
        """int64 [R]: an id for each row of `hidden`, as `kernels/sampling/draw.py` draws it from their logits."""
        return self.kernels.draw(self.logits(hidden), chances)

    def leaves(self) -> Iterator[Leaf]:
        """Everything that owns weights, in the order it is to be loaded (a tied head behind the embedding)."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.leaves()
        yield self.norm
        yield self.head
