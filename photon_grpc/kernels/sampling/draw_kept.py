"""One id for each row of logits among those that the row's filters keep, by the Gumbel-max trick.

    id = argmax(s + gumbel(seed, position, output index, token)) over s = logits / temperature not below the threshold

The threshold is that of `topk_topp.py`; noise and the ids of greedy rows are those of `draw.py`, so that a row without
filters draws what it draws there. INVALID (-1) where a row holds NaN or +infinity, or nothing above -infinity.

Shapes: logits float32 [R, V], SamplingMetadata of the R rows, Filters of every slot -> ids int64 [R] and the highest
logits float32 [R], which are not finite where the id is INVALID.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from photon_grpc.kernels.jit import launches
from photon_grpc.kernels.sampling import noise, topk_topp
from photon_grpc.kernels.sampling.draw import INVALID, SamplingMetadata
from photon_grpc.kernels.sampling.histogram import Filters
from photon_grpc.kernels.sampling.noise import MAX_GUMBEL, MIN_GUMBEL


class Drawn(NamedTuple):
    """ids int64 [R]; best float32 [R], the highest logits."""

    ids: torch.Tensor
    best: torch.Tensor


def reference(logits: torch.Tensor, metadata: SamplingMetadata, filters: Filters | None) -> Drawn:
    """draw_kept in torch; None: no slot filters. On a CPU noise is made for kept ids only."""
    return _draw(logits, metadata, filters, topk_topp.reference, noise.reference)


def launch(logits: torch.Tensor, metadata: SamplingMetadata, filters: Filters | None) -> Drawn:
    """As `reference`."""
    if not launches(logits):
        return reference(logits, metadata, filters)
    return _draw(logits, metadata, filters, topk_topp.launch, noise.launch)


def _draw(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    filters: Filters | None,
    find_thresholds: Callable[..., torch.Tensor],
    make_noise: Callable[..., torch.Tensor],
) -> Drawn:
    best, greedy = logits.max(-1)
    slots = metadata.slots
    temperature = metadata.temperature[slots]
    is_greedy, ids = temperature <= 0.0, greedy
    if logits.is_cuda or not is_greedy.all():
        scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
        # A token this far below the best cannot win, whatever the noise.
        smallest = scaled.amax(-1) - (MAX_GUMBEL - MIN_GUMBEL)
        if filters is not None:
            smallest = torch.maximum(smallest, find_thresholds(scaled, *(each[slots] for each in filters)))
        draw = draw_all if logits.is_cuda else draw_each
        ids = torch.where(is_greedy, greedy, draw(scaled, smallest, metadata, make_noise))
    return Drawn(torch.where(best.isfinite(), ids, INVALID), best)


def draw_all(
    scaled: torch.Tensor, smallest: torch.Tensor, metadata: SamplingMetadata, make_noise: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """int64 [R]: of the scaled logits not below `smallest`, the one that wins with its noise; noise for all."""
    made = make_noise(*_noise_keys(metadata), scaled.shape[1])
    return made.add_(scaled).masked_fill_(scaled < smallest[:, None], -torch.inf).argmax(-1)


def draw_each(
    scaled: torch.Tensor, smallest: torch.Tensor, metadata: SamplingMetadata, make_noise: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """As `draw_all`, row by row, with noise for the kept tokens only."""
    keys, drawn = _noise_keys(metadata), []
    for row in range(scaled.shape[0]):
        kept = (scaled[row] >= smallest[row]).nonzero().view(1, -1)
        made = make_noise(*(key[row : row + 1] for key in keys), kept)
        drawn.append(kept[0, (made[0] + scaled[row, kept[0]]).argmax()] if kept.numel() else kept.new_zeros(()))
    return torch.stack(drawn)


def _noise_keys(metadata: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row: seed, generated position, output index."""
    slots = metadata.slots
    position = metadata.context_len - metadata.num_prompt[slots]
    return metadata.seed[slots], position, metadata.output_index[slots]
