"""A head of which every rank has a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from photon_grpc.kernels.lang.jit import launches
from photon_grpc.kernels.sampling.sample import SamplingMetadata, TileBest, best_launch, config, merge
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.linear import LinearMethod
from photon_grpc.layers.parallel.group import Group
from photon_grpc.layers.parameter_owner import Part

#: Ids of a rank begin at a multiple of the first, so that tiles of the head fit, or of the first that leaves all some.
GRAINS = 64, 16, 1


class VocabularyParallelHead(LMHead):
    """A head of which every rank has the logits of consecutive ids, the last one perhaps of fewer.

    Every rank samples the same id of every row: from the best of all ranks' ids, since noise depends on the id alone,
    or, where filters, penalties or masks need them, from the gathered logits of all.
    """

    def __init__(
        self,
        name: str,
        embedding: Embedding,
        *,
        tied: bool,
        method: LinearMethod,
        sample: Callable[[torch.Tensor, SamplingMetadata], torch.Tensor],
        group: Group,
    ) -> None:
        self.group = group
        self.vocab_size = embedding.weight.shape[0]
        #: Ids of a rank.
        self.width = width(self.vocab_size, group.size)
        begin = group.rank * self.width
        ids = slice(begin, min(begin + self.width, self.vocab_size))
        super().__init__(name, embedding, tied=tied, method=method, sample=sample, ids=ids)

    def sample(self, x: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        best = best_launch(super().logits(x), metadata, self.ids.start)
        packed = torch.stack((best.value, best.top, best.number.view(torch.float32)))
        # The last rank may have fewer tiles.
        num_tiles = -(-self.width // config()["BLOCK"]) if launches(x) else 1
        parts = self.group.gather(F.pad(packed, (0, num_tiles - packed.shape[2]), value=-torch.inf))
        # Of one tile a rank `reshape` makes no copy, and a kernel takes rows that follow each other.
        value, top, number = (each.reshape(len(x), -1).contiguous() for each in parts.permute(1, 2, 0, 3))
        return merge(TileBest(value, top, number.view(torch.int32)))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        own = super().logits(x)
        parts = self.group.gather(F.pad(own, (0, self.width - own.shape[1])))
        return parts.transpose(0, 1).reshape(len(own), -1)[:, : self.vocab_size].contiguous()

    def fused(self) -> LMHead:
        """Return this loaded head with its method's kernels for few rows; none samples, since none has all ids."""
        head = super().fused()
        head._sample_gemms = {}
        return head

    def part(
        self, output: str, shape: tuple[int, ...], *, rows: int | None = 0, columns: int | None = 1
    ) -> Part | None:
        if rows is None:
            return None
        whole = tuple(self.vocab_size if at == rows else size for at, size in enumerate(shape))
        return Part(tuple(self.ids if at == rows else slice(None) for at in range(len(shape))), whole)


def width(vocab_size: int, size: int) -> int:
    """Return the ids that a rank has, all but the last."""
    share = -(-vocab_size // size)
    widths = (-(-share // grain) * grain for grain in GRAINS if share >= grain)
    return next((each for each in widths if each * (size - 1) < vocab_size), share)


def can_share_vocabulary(vocab_size: int, size: int) -> bool:
    """Return whether every rank has an id."""
    return width(vocab_size, size) * (size - 1) < vocab_size
