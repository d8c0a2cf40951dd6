"""Rows to sample; thresholds and noise in the form of the references."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch

from photon_grpc.kernels.lang.jit import jit, tl
from photon_grpc.kernels.sampling import sample, topk_topp
from photon_grpc.kernels.sampling.histogram import Filters
from photon_grpc.kernels.sampling.noise import gumbel
from photon_grpc.kernels.sampling.sample import SamplingMetadata, TileBest


def metadata_of(temperature: torch.Tensor) -> SamplingMetadata:
    """Return rows in different slots, in reverse order, with different keys."""
    slots = torch.arange(len(temperature), device=temperature.device).flip(0)
    return SamplingMetadata(slots, slots + 9, temperature.flip(0), slots * 2**54 + 5, slots % 3, slots // 2)


def filters_of(top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> Filters:
    """Return the filters of rows, for the slots of `metadata_of`."""
    return Filters(top_k.flip(0), top_p.flip(0), min_p.flip(0))


def thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return thresholds by the kernels, at temperature 1."""
    metadata = metadata_of(torch.ones(len(scaled), device=scaled.device))
    return topk_topp.launch(scaled, metadata, filters_of(top_k, top_p, min_p)).thresholds


def winning_values(launch: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return float32 [2, R] of kernels that sample: what the sampled id of each row has won with, the highest logit."""
    found: list[TileBest] = []

    def merged(best: TileBest) -> torch.Tensor:
        found.append(best)
        return merge(best)

    merge = sample.merge
    with patch.object(sample, "merge", merged):
        launch()
    (best,) = found
    return torch.stack((best.value.amax(-1), best.top.amax(-1)))


@jit
def noise_kernel(seed, position, output_index, tokens, out, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = row.to(tl.int64) * num_columns + column, column < num_columns
    ids = tl.load(tokens + place, mask=inside, other=0)
    noise = gumbel(tl.load(seed + row), tl.load(position + row), tl.load(output_index + row), ids)
    tl.store(out + place, noise, mask=inside)


def noise_of(
    seed: torch.Tensor, position: torch.Tensor, output_index: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return float32 [R, N], the noise that kernels add to the tokens [R, N]."""
    out = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
    grid = len(tokens), -(-tokens.shape[1] // 1024)
    noise_kernel[grid](seed, position, output_index, tokens.contiguous(), out, tokens.shape[1], BLOCK=1024)
    return out
