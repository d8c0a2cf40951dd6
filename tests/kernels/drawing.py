"""Rows to draw for, and thresholds as the reference is asked for them."""

from __future__ import annotations

import torch

from photon_grpc.kernels.sampling import topk_topp
from photon_grpc.kernels.sampling.draw import SamplingMetadata
from photon_grpc.kernels.sampling.histogram import Filters


def metadata_of(temperature: torch.Tensor) -> SamplingMetadata:
    """Rows in slots of their own, in reverse, with keys of their own."""
    slots = torch.arange(len(temperature), device=temperature.device).flip(0)
    return SamplingMetadata(slots, slots + 9, temperature.flip(0), slots * 2**54 + 5, slots % 3, slots // 2)


def filters_of(top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> Filters:
    """Of rows, for the slots of `metadata_of`."""
    return Filters(top_k.flip(0), top_p.flip(0), min_p.flip(0))


def thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """By the kernels, at temperature 1."""
    metadata = metadata_of(torch.ones(len(scaled), device=scaled.device))
    return topk_topp.launch(scaled, metadata, filters_of(top_k, top_p, min_p)).thresholds
