"""Ids to vectors, and vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from photon_grpc.layers.leaf import Target
from photon_grpc.layers.prepacked import Prepacked, can_prepack


class Embedding:
    """Row `id` of a table [vocab_size, hidden_size]."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        self.name = name
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device="meta")

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden_size]."""
        return F.embedding(token_ids, self.weight)

    def allocate(self, device: torch.device) -> None:
        self.weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device=device)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight)

    def after_load(self) -> None:
        """A table is read row by row: it stays as it is."""


class LMHead:
    """logits = x Wᵀ in float32. W [vocab_size, hidden_size] is its own, or where tied the embedding's.

    On a CPU W is packed. Where tied that is a second copy (525 MB for 128k × 2,048 in bfloat16) beside the embedding, whose rows
    must stay readable; it takes 14 ms instead of 30 for one row, a quarter of the whole step.
    """

    def __init__(self, name: str, embedding: Embedding, *, tied: bool) -> None:
        self.name = name
        self.embedding = embedding if tied else None
        self.weight = torch.empty(embedding.weight.shape, dtype=embedding.weight.dtype, device="meta")
        self.packed: Prepacked | None = None

    @property
    def is_tied(self) -> bool:
        return self.embedding is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size]."""
        if self.packed is not None:
            return self.packed(x).float()
        if x.is_cuda and x.dtype != torch.float32:
            # The sums are float32 in the multiplier: they are not rounded on the way out.
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return F.linear(x, self.weight).float()

    def allocate(self, device: torch.device) -> None:
        if self.embedding is None:
            self.weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device=device)

    def targets(self) -> Iterator[Target]:
        if self.embedding is None:
            yield Target(self.name, self.weight)

    def after_load(self) -> None:
        """The embedding, where tied, is loaded before."""
        if self.embedding is not None:
            self.weight = self.embedding.weight
        if can_prepack(self.weight):
            self.packed = Prepacked(self.weight, None)
            self.weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device="meta")
