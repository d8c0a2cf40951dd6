"""Latent attention: all heads share one latent of keys and values, which alone is kept.

    q = W_q x, or W_b norm(W_a x);  c, r = W_kv x;  c = norm(c)
    key of a head = W_k c beside rotated r;  value = W_v c

W_k is absorbed into queries and W_v into what is attended, so attention runs over latents:

    q · k = (W_kᵀ q_plain) · c + q_rotated · r,   Σ p · v = W_v Σ p · c

The checkpoint has a head's rotated numbers in pairs (0, 1), (2, 3) …; here the first of all pairs come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from photon_grpc.config.latent import LatentSpec
from photon_grpc.core.kv import LayerKV
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.layers.attention import Attention
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.linear import Linear
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parameter_owner import ParameterOwner, Target
from photon_grpc.layers.rotary import RotaryEmbedding


class OrderedLinear(Linear):
    """A Linear whose rows of W have another order in the checkpoint: `orders` by the name of an output."""

    orders: dict[str, torch.Tensor]

    def targets(self) -> Iterator[Target]:
        names = {self.prefix + name: order for name, order in self.orders.items()}
        for target in super().targets():
            order = names.get(target.name.rpartition(".")[0])
            yield target if order is None else target._replace(order=order)


class LatentExpansion:
    """The weight that expands latents to keys and values of every head, [Hq · (plain + value), rank]."""

    def __init__(self, name: str, num_heads: int, sizes: LatentSpec, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        self._split = num_heads, sizes.plain, sizes.value
        self.weight = torch.empty(num_heads * (sizes.plain + sizes.value), sizes.rank, dtype=dtype, device="meta")
        #: [Hq, plain, rank] and [Hq, rank, value], once loaded.
        self.of_keys = self.of_values = self.weight

    @property
    def num_parameters(self) -> int:
        return self.weight.numel()

    def allocate(self, device: torch.device) -> None:
        self.weight = torch.empty(self.weight.shape, dtype=self.dtype, device=device)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight)

    def after_load(self) -> None:
        num_heads, plain, _ = self._split
        heads = self.weight.view(num_heads, -1, self.weight.shape[1])
        self.of_keys, self.of_values = heads[:, :plain], heads[:, plain:].transpose(1, 2)


class QueryLatent(NamedTuple):
    """The norm of the latents of queries, and the projection behind it."""

    norm: RMSNorm
    expand: Linear


class LatentAttention(Attention):
    """Attention over latents; `qkv` gives queries, or their latents, and the latents of keys and values."""

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
        query: QueryLatent | None = None,
    ) -> None:
        super().__init__(spec, kv, qkv=qkv, output=output, rotary=rotary)
        self.sizes = sizes
        self.norm = norm
        self.expansion = expansion
        self.query = query

    def __call__(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Attend: [T, hidden] -> [T, hidden]. Writes the latents of all T tokens before any attends."""
        sizes, num_tokens = self.sizes, x.shape[0]
        q, c, r = self.qkv(x, ctx).split_with_sizes((self._query_width, sizes.rank, sizes.rotated), 1)
        if self.query is not None:
            q = self.query.expand(self.query.norm(q.contiguous()), ctx)
        q = q.reshape(num_tokens, self.spec.num_heads, sizes.head)
        rotated, key = self.rotary(q[..., sizes.plain :].contiguous(), r.reshape(num_tokens, 1, -1), ctx)
        latent = torch.cat((self.norm(c.contiguous())[:, None], key), -1)
        attention = ctx.kv[self.place].attention
        attention.write(latent, latent, self.layer)
        absorbed = torch.bmm(q[..., : sizes.plain].transpose(0, 1), self.expansion.of_keys).transpose(0, 1)
        attended = attention.attend(torch.cat((absorbed, rotated), -1), self.layer)
        values = torch.bmm(attended.transpose(0, 1), self.expansion.of_values).transpose(0, 1)
        return self.output(values.reshape(num_tokens, -1), ctx)

    @property
    def _query_width(self) -> int:
        return self.sizes.query_rank or self.spec.num_heads * self.sizes.head

    def leaves(self) -> tuple[ParameterOwner, ...]:
        query = () if self.query is None else (self.query.norm, self.query.expand)
        return (self.qkv, *query, self.norm, self.expansion, self.output)
