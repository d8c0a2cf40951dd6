"""Latent attention: all heads share one latent of keys and values, which alone is kept.

    q = W_q x, or W_b norm(W_a x);  c, r = W_kv x;  c = norm(c)
    key of a head = W_k c beside rotated r;  value = W_v c

W_k is absorbed into queries and W_v into what is attended, so attention runs over latents:

    q · k = (W_kᵀ q_plain) · c + q_rotated · r,   Σ p · v = W_v Σ p · c

The checkpoint has a head's rotated numbers in pairs (0, 1), (2, 3) …; here the first of all pairs come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from photon_grpc.config.latent import LatentSpec
from photon_grpc.core.kv import LayerKV
from photon_grpc.kernels.attention.latent import lane_bytes
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parameter_owner import OneWeight, ParameterOwner, Target
from photon_grpc.layers.rotary import RotaryEmbedding


class OrderedLinear(Linear):
    """A Linear whose rows of W have a different order in the checkpoint: `orders` by output name."""

    orders: dict[str, torch.Tensor]

    def targets(self) -> Iterator[Target]:
        names = {self.prefix + name: order for name, order in self.orders.items()}
        for target in super().targets():
            order = names.get(target.name.rpartition(".")[0])
            yield target if order is None else target._replace(order=order)


class LatentExpansion(OneWeight):
    """The weight that expands latents to keys and values of every head, [Hq · (plain + value), rank]."""

    def __init__(self, name: str, num_heads: int, sizes: LatentSpec, dtype: torch.dtype) -> None:
        super().__init__(name, (num_heads * (sizes.plain + sizes.value), sizes.rank), dtype)
        self._split = num_heads, sizes.plain
        #: [Hq, plain, rank], once loaded.
        self.of_keys = self.weight

    def after_load(self) -> None:
        num_heads, plain = self._split
        self.of_keys = self.weight.view(num_heads, -1, self.weight.shape[1])[:, :plain]


class QueryLatent(NamedTuple):
    """The norm of the latent queries, and the projection after it."""

    norm: RMSNorm
    expand: Linear


class LatentAttention(Attention):
    """Attention over latents; `qkv` gives queries and the latents of keys and values."""

    def __init__(
        self,
        spec: AttentionSpec,
        kv: LayerKV,
        sizes: LatentSpec,
        *,
        qkv: Linear,
        output: Linear,
        rotary: RotaryEmbedding,
        norm: RMSNorm,
        expansion: LatentExpansion,
    ) -> None:
        super().__init__(spec, kv, qkv=qkv, output=output, rotary=rotary)
        self.sizes = sizes
        self.norm = norm
        self.expansion = expansion

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Attend: [T, hidden] -> [T, hidden]. Writes the latents of all T tokens before any attends."""
        sizes, num_tokens = self.sizes, x.shape[0]
        projected = self.qkv(x, ctx)
        q, c, r = projected.split_with_sizes((projected.shape[1] - sizes.width, sizes.rank, sizes.rotated), 1)
        q = self.expanded(q, ctx).reshape(num_tokens, self.spec.num_heads, sizes.head)
        rotated, key = self.rotary(q[..., sizes.plain :].contiguous(), r.reshape(num_tokens, 1, -1), ctx)
        latent = torch.cat((self.norm(c.contiguous())[:, None], key), -1)
        ctx.kv[self.place].attention.write(latent, latent, self.layer)
        plain, of_keys = q[..., : sizes.plain].transpose(0, 1), self.expansion.of_keys
        absorbed = torch.bmm(plain.to(self.spec.dtype), of_keys.to(self.spec.dtype)).transpose(0, 1).to(x.dtype)
        values = x.new_empty(num_tokens, self.output.in_features)
        self.attend(torch.cat((absorbed, rotated), -1), values, ctx)
        return self.output(values, ctx)

    def lane_bytes(self, num_tokens: int, longest: int) -> int:
        return lane_bytes(num_tokens, self.spec.num_heads, longest, self.sizes.rank)

    def expanded(self, q: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Return the queries of all heads from the output of the first projection."""
        return q

    def attend(self, q: torch.Tensor, out: torch.Tensor, ctx: StepContext) -> None:
        sizes, shape = self.sizes, (out.shape[0], self.spec.num_heads, -1)
        attention = ctx.kv[self.place].attention
        attention.values(q.view(shape), self.layer, self.expansion.weight, sizes.plain, out.view(shape))

    def leaves(self) -> tuple[ParameterOwner, ...]:
        return (self.qkv, self.norm, self.expansion, self.output)


class QueryLatentAttention(LatentAttention):
    """Attention over latents, with latent queries."""

    def __init__(self, *args: Any, query: QueryLatent, **options: Any) -> None:
        super().__init__(*args, **options)
        self.query = query

    def expanded(self, q: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        return self.query.expand(self.query.norm(q.contiguous()), ctx)

    def leaves(self) -> tuple[ParameterOwner, ...]:
        return (self.qkv, *self.query, self.norm, self.expansion, self.output)
