"""The head of a model and the ids sampled from it, for few rows: logits are made by tiles and need not be written.

    logits:  x Wᵀ in float32
    sample:  the id that `sample.py` would give for them

A program takes a tile of the vocabulary for all rows, adds the noise of rows that are not greedy and keeps the best of
each row; a second kernel takes the best of those. Both multiply in the same order: filters see the logits that
sampling without filters saw.

Shapes: x [R, H] contiguous, W [V, H], the rest as for `sample.py`. bf16 and fp16; R at most tiles.BUCKETS[-1].
Bytes moved: V · H · itemsize.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.linear import epilogue
from photon_grpc.kernels.linear.fused_linear import Affine, Fusion, launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.sampling import sample
from photon_grpc.kernels.sampling.sample import SamplingMetadata

LOGITS = Fusion(epilogue.load_nothing, epilogue.store_sums, guard=True)


def logits_reference(x: torch.Tensor, linear: Affine) -> torch.Tensor:
    """Return logits in torch: float32 [R, V]."""
    return x.float() @ linear.matrix.T


def sample_reference(x: torch.Tensor, linear: Affine, metadata: SamplingMetadata) -> torch.Tensor:
    """Return sampled ids in torch: int64 [R]."""
    return sample.reference(logits_reference(x, linear), metadata)


def logits_launch(x: torch.Tensor, linear: Affine, tile: Tile, counters: torch.Tensor | None = None) -> torch.Tensor:
    """Return logits: float32 [R, V]; `counters` as of `fused_linear.launch`."""
    if not linear.launches:
        return logits_reference(x, linear)
    logits = torch.empty((x.shape[0], linear.w.shape[0]), dtype=torch.float32, device=x.device)
    launch(LOGITS, tile, linear, x, logits, counters=counters)
    return logits


def sample_launch(x: torch.Tensor, linear: Affine, metadata: SamplingMetadata, tile: Tile) -> torch.Tensor:
    """Return sampled ids: int64 [R]."""
    if not linear.launches:
        return sample_reference(x, linear, metadata)
    best = sample.best_of_tiles(x.shape[0], linear.w.shape[0] // tile.BN, x.device)
    fusion = Fusion(epilogue.load_nothing, epilogue.store_best, (metadata, best.top, best.number), guard=True)
    launch(fusion, tile, linear, x, best.value)
    return sample.merge(best)
