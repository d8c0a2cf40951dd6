"""A norm over numbers of which every rank has a part."""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.layers.norm import OnceRoundedRMSNorm
from photon_grpc.layers.parallel.group import Group, RankShare


class GatheredRMSNorm(OnceRoundedRMSNorm):
    """A norm over the parts of all ranks, which are gathered: a rank's part of its result. Its weight is whole."""

    def __init__(self, name: str, size: int, eps: float, *, group: Group, share: RankShare, **options: Any) -> None:
        super().__init__(name, size, eps, **options)
        self._group = group
        self._share = share

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise [T, size / parts] -> the same shape."""
        # Where there are fewer parts than ranks, neighbours have the same.
        parts = self._group.gather(x)[:: self._group.size // self._share.count]
        whole = super().__call__(torch.cat(tuple(parts), -1))
        return whole[:, self._share.of(whole.shape[1])].contiguous()
