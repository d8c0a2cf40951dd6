"""Token ids to vectors."""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.linear import embed
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.parameter_owner import OneWeight


class Embedding(OneWeight):
    """A table [vocab_size, hidden_size] whose row `id` is the vector of that id."""

    #: A tensor, or a QuantizedWeight.
    weight: Any
    #: What the row is multiplied by.
    factor: float | None = None

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__(name, (vocab_size, hidden_size), dtype)

    def __call__(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Look up [T] int32 or int64 -> [T, hidden_size]."""
        return embed.rows(self.weight, token_ids)

    def part(self, ids: slice) -> Any:
        """Return the loaded weight of some ids, for a tied head."""
        return self.weight[ids]


class ScaledEmbedding(Embedding):
    """An embedding times sqrt(hidden_size), which is rounded to the weights' dtype. A tied head has W without it."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__(name, vocab_size, hidden_size, dtype=dtype)
        self.factor: float = float(torch.tensor(hidden_size**0.5, dtype=dtype))

    def __call__(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        return super().__call__(token_ids, ctx).mul_(self.factor)
