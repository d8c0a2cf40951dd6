"""Layers whose fused kernels follow one another by programmatic dependent launch, and the buffers between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from photon_grpc.kernels import DependentChain
from photon_grpc.kernels.attention.dispatch import MAX_DECODE_ROWS
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.rotary.rotate_store import Rotation
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.epilogues import bucket
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.workspace import RowSums, Workspace


class FusedChain:
    """The buffers of all fused layers with the same sizes, of any KVGroup; the layers of a step share them.

    Args:
        linears: those of a layer whose products are fused, in order.
        buckets: the buckets of tokens in which the layers' products are fused.
    """

    def __init__(
        self, attention: Attention, linears: Sequence[Linear], buckets: frozenset[int], device: torch.device
    ) -> None:
        self._buckets = buckets
        heads = attention.output.in_features
        self._sizes = attention.qkv.in_features, attention.query_width, heads, linears[-1].in_features
        self._dtype, self._device = attention.qkv.dtype, device
        # Zero before and after every kernel that counts its programs; each kernel of a step waits for the one before.
        num_tiles = max(linear.out_features for linear in linears) // 16
        num_counters = max(num_tiles, MAX_DECODE_ROWS * attention.kv.format.heads)
        self._counters = torch.zeros(num_counters, dtype=torch.int32, device=device)

    def takes(self, num_tokens: int) -> bool:
        """Return whether a step of `num_tokens` tokens runs in the fused layers."""
        return num_tokens > 0 and bucket(num_tokens) in self._buckets

    def dependent(self, history_is_settled: bool) -> DependentChain:
        """Return the chain for the attention of a step that it takes."""
        return DependentChain(self._counters, history_is_settled)

    def workspace(self, num_tokens: int, attention: Attention, ctx: StepContext) -> Workspace | None:
        """Return the step's buffers for layers with this place and rotary, made on first use; None if it skips it."""
        key = self, attention.place, attention.rotary
        if key not in ctx.memo:
            ctx.memo[key] = self._make(num_tokens, attention, ctx) if self.takes(num_tokens) else None
        work: Workspace | None = ctx.memo[key]
        return work

    def _make(self, num_tokens: int, attention: Attention, ctx: StepContext) -> Workspace:
        rows = bucket(num_tokens)
        if self not in ctx.memo:
            h, *others = (self._buffer(rows, num_tokens, size, self._dtype) for size in self._sizes)
            partial = self._buffer(rows, num_tokens, self._sizes[0] // squares.GROUP, torch.float32)
            # The layers of all groups and rotaries change one stream.
            ctx.memo[self] = h, RowSums(partial), *others
        slots = ctx.kv[attention.place].slot_mapping.long()
        rotation = Rotation(attention.rotary.cos, attention.rotary.sin, ctx.positions, slots)
        return Workspace(rows, *ctx.memo[self], rotation, self._counters)

    def _buffer(self, rows: int, num_tokens: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows or num_tokens, size, dtype=dtype, device=self._device)[:num_tokens]
