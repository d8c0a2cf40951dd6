"""The output head: hidden states to logits, or to ids sampled from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch

from photon_grpc.kernels.linear import tiles
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.epilogues import Gemm, Logits, Sample, bucket
from photon_grpc.layers.linear import Linear, LinearMethod
from photon_grpc.layers.parameter_owner import Target

LOGITS, SAMPLE = Logits(), Sample()


class LMHead(Linear):
    """Logits x Wᵀ in float32. W [vocab_size, hidden_size] is its own, or the embedding's if tied.

    On a CPU W is packed. Where tied that is a second copy (525 MB for 128k × 2,048 in bfloat16) beside the embedding,
    whose rows must stay readable; it takes 14 ms instead of 30 for one row, a quarter of the whole step.

    Args:
        name: the name of the projection in the checkpoint.
        sample: the kernel that samples an id from each row of logits.
        ids: those whose logits are computed; None: all.
    """

    def __init__(
        self,
        name: str,
        embedding: Embedding,
        *,
        tied: bool,
        method: LinearMethod,
        sample: Callable[[torch.Tensor, SamplingMetadata], torch.Tensor],
        ids: slice | None = None,
    ) -> None:
        #: As a checkpoint names W.
        self.name = name + ".weight"
        self.embedding = embedding if tied else None
        self._sample = sample
        #: Bucket of rows -> the product with its epilogue; `_any` is for every other number of rows.
        self._logits: dict[int, Gemm | None] = {}
        self._sample_gemms: dict[int, Gemm] = {}
        self._any: Gemm | None = None
        vocab_size, hidden_size = embedding.weight.shape
        self.ids = ids or slice(0, vocab_size)
        outputs = {name: self.ids.stop - self.ids.start}
        super().__init__("", hidden_size, outputs, bias=False, dtype=embedding.weight.dtype, method=method)

    @property
    def is_tied(self) -> bool:
        return self.embedding is not None

    @property
    def num_parameters(self) -> int:
        return 0 if self.is_tied else super().num_parameters

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits: [R, hidden_size] -> float32 [R, vocab_size]."""
        gemm = self._logits.get(bucket(x.shape[0]), self._any)
        return self(x, None).float() if gemm is None else gemm(x)

    def sample(self, x: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Sample an id for each row as `kernels/sampling/sample.py` does: [R, hidden_size] -> int64 [R]."""
        gemm = self._sample_gemms.get(bucket(x.shape[0]))
        return self._sample(self.logits(x), metadata) if gemm is None else gemm(x, metadata)

    def fused(self) -> LMHead:
        """Return this loaded head with its method's kernels for few rows; those that sample write no logits."""
        head = copy.copy(self)
        head._logits = {rows: self.gemm(rows, LOGITS) for rows in tiles.BUCKETS}
        gemms = {rows: self.gemm(rows, SAMPLE) for rows in tiles.BUCKETS}
        head._sample_gemms = {rows: gemm for rows, gemm in gemms.items() if gemm is not None}
        return head

    def allocate(self, device: torch.device) -> None:
        """Allocate nothing if tied."""
        super().allocate(device if self.embedding is None else torch.device("meta"))

    def targets(self) -> Iterator[Target]:
        return iter(()) if self.is_tied else super().targets()

    def after_load(self) -> None:
        """Convert W to its final form; a tied embedding is already loaded."""
        if self.embedding is not None:
            self.weight = self.embedding.part(self.ids)
        super().after_load()
        self._any = self.gemm(0, LOGITS)
