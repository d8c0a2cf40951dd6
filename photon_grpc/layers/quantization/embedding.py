"""An embedding of 8 bits, with a scale a row: the weight of a Linear of which rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from photon_grpc.layers.context import StepContext
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.parameter_owner import Target
from photon_grpc.layers.quantization.weight_only import WeightOnly


class QuantizedEmbedding(Embedding):
    """An embedding whose loaded weight is a QuantizedWeight. A tied head multiplies by the same tensors.

    Args:
        plain: the embedding that it takes the place of, before it is loaded.
        method: an EmbeddingRows.
    """

    def __init__(self, plain: Embedding, method: LinearMethod) -> None:
        self.name = plain.name
        self.factor = plain.factor
        (vocab_size, hidden_size), dtype = plain.weight.shape, plain.weight.dtype
        outputs = {plain.name.removesuffix(".weight"): vocab_size}
        self._table = Linear("", hidden_size, outputs, bias=False, dtype=dtype, method=method)
        self.weight = self._table.weight

    def __call__(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        found = super().__call__(token_ids, ctx)
        return found if self.factor is None else found.mul_(self.factor)

    def part(self, ids: slice) -> Any:
        return self.weight.part(ids)

    @property
    def num_parameters(self) -> int:
        return self._table.num_parameters

    def allocate(self, device: torch.device) -> None:
        self._table.allocate(device)
        self.weight = self._table.weight

    def targets(self) -> Iterator[Target]:
        return self._table.targets()

    def after_load(self) -> None:
        self._table.after_load()
        self.weight = self._table.weight


class EmbeddingRows(WeightOnly):
    """The format of a quantized embedding: never packed for a CPU, because its rows are read."""

    def pack(self, linear: Linear) -> None:
        """Do nothing."""
