"""One id for each row of logits among those that the row's filters keep, by the Gumbel-max trick.

    id = argmax(s + gumbel(seed, position, output index, token)) over s = logits / temperature not below the threshold

The threshold is that of `topk_topp.py`; noise and greedy ids are those of `sample.py`, so a row without
filters gets the same id there. INVALID and NOTHING as there.

Shapes: logits float32 [R, V], SamplingMetadata of the R rows, Filters of every slot, bool [R] of rows for which a ban,
a limit or a mask holds (None: for none) -> int64 [R].
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.jit import jit, launches, tl
from photon_grpc.kernels.sampling import noise, sample, topk_topp
from photon_grpc.kernels.sampling.histogram import Filters
from photon_grpc.kernels.sampling.noise import gumbel
from photon_grpc.kernels.sampling.sample import SamplingMetadata, TileBest, checked


def reference(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    filters: Filters | None,
    is_constrained: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample in torch; without `filters` no slot filters. On a CPU noise is gumbels for kept ids only."""
    best, greedy = logits.max(-1)
    slots = metadata.slots
    temperature = metadata.temperature[slots]
    is_greedy, ids = temperature <= 0.0, greedy
    if logits.is_cuda or not is_greedy.all():
        scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
        # A token this far below the best cannot win, whatever the noise.
        smallest = scaled.amax(-1) - topk_topp.SIZES.RANGE
        if filters is not None:
            smallest = torch.maximum(smallest, topk_topp.reference(scaled, *(each[slots] for each in filters)))
        sample_kept = sample_all if logits.is_cuda else sample_each
        ids = torch.where(is_greedy, greedy, sample_kept(scaled, smallest, metadata))
    return checked(ids, best, is_constrained)


def sample_all(scaled: torch.Tensor, smallest: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Return int64 [R]: of the scaled logits not below `smallest`, the winner with its noise; noise for all."""
    gumbels = noise.reference(*_noise_keys(metadata), scaled.shape[1])
    return gumbels.add_(scaled).masked_fill_(scaled < smallest[:, None], -torch.inf).argmax(-1)


def sample_each(scaled: torch.Tensor, smallest: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """Sample as `sample_all` does, row by row, with noise for the kept tokens only."""
    keys, sampled = _noise_keys(metadata), []
    for row in range(scaled.shape[0]):
        kept = (scaled[row] >= smallest[row]).nonzero().view(1, -1)
        gumbels = noise.reference(*(key[row : row + 1] for key in keys), kept)
        sampled.append(kept[0, (gumbels[0] + scaled[row, kept[0]]).argmax()] if kept.numel() else kept.new_zeros(()))
    return torch.stack(sampled)


def _noise_keys(metadata: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return seed, generated position and output index of each row."""
    slots = metadata.slots
    position = metadata.context_len - metadata.num_prompt[slots]
    return metadata.seed[slots], position, metadata.output_index[slots]


@jit
def better(value, number, other_value, other_number):
    """Return, elementwise, the higher value with its number; of equal values the lower number."""
    is_other = (other_value > value) | ((other_value == value) & (other_number < number))
    return tl.where(is_other, other_value, value), tl.where(is_other, other_number, number)


@jit
def sample_listed(search, metadata, place, row, temperature, SIZES: tl.constexpr):
    """Return the best value among the kept elements of a chunk's lists, and its id."""
    slot = tl.load(metadata.slots + row)
    position = tl.load(metadata.context_len + row) - tl.load(metadata.num_prompt + slot)
    seed, index = tl.load(metadata.seed + slot), tl.load(metadata.output_index + slot)
    top = tl.div_rn(tl.load(search.best + row), temperature)
    smallest = tl.maximum(tl.load(search.thresholds + row), top - SIZES.RANGE)
    num_within, num_above = tl.load(search.num_within + place), tl.load(search.num_above + place)
    best = tl.full([SIZES.SAMPLED], -float("inf"), tl.float32)
    number = tl.full([SIZES.SAMPLED], 2147483647, tl.int32)
    for start in range(0, num_within + num_above, SIZES.SAMPLED):
        offset = start + tl.arange(0, SIZES.SAMPLED)
        is_listed = offset < num_within + num_above
        offset = tl.where(offset < num_within, offset, SIZES.CHUNK - 1 - (offset - num_within))
        entry = tl.load(search.listed + place * SIZES.CHUNK + offset, mask=is_listed, other=0)
        token, logit = entry.to(tl.int32), (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        scaled = tl.div_rn(logit, temperature)
        value = scaled + gumbel(seed, position, index, token)
        value = tl.where(is_listed & (scaled >= smallest), value, -float("inf"))
        best, number = better(best, number, value, token)
    highest = tl.max(best, axis=0)
    return highest, tl.min(tl.where(best == highest, number, 2147483647), axis=0)


@jit
def sample_filtered_kernel(metadata, search, SIZES: tl.constexpr):
    """Store the best kept value of a chunk and its id, for rows that are not greedy; grid (S, R)."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * search.num_splits + split
    temperature = tl.load(metadata.temperature + tl.load(metadata.slots + row))
    if temperature > 0.0:
        best, number = sample_listed(search, metadata, place, row, temperature, SIZES)
        tl.store(search.best_values + place, best)
        tl.store(search.ids + place, number)


def config() -> dict[str, Any]:
    """Return the compile-time arguments of `sample_filtered_kernel`."""
    return {"SIZES": topk_topp.SIZES, "num_warps": 4}


def launch(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    filters: Filters | None,
    is_constrained: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample as `reference` does."""
    if filters is None or not launches(logits):
        return reference(logits, metadata, filters, is_constrained)
    search = topk_topp.launch(logits, metadata, filters)
    if logits.shape[0]:
        sample_filtered_kernel[(search.num_splits, logits.shape[0])](metadata, search, **config())
    return sample.merge(TileBest(search.best_values, search.tops, search.ids, is_constrained))
