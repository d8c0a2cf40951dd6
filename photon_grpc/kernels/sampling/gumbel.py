"""Gumbel noise keyed by (seed, position, output, token), in torch and as a device function; `kernels/sampling/noise.py` says what it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from photon_grpc.kernels.jit import jit, tl
from photon_grpc.kernels.sampling.philox import MASK, philox4x32, philox_word

# Bounds of the noise: a token whose score is MAX_GUMBEL - MIN_GUMBEL below another's can never win.
MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-24)))
MIN_GUMBEL = -math.log(24 * math.log(2.0))

# Words drawn at a time, so that what ten rounds read and write stays in the second-level cache.
CHUNK = 16384


def reference(
    seed: torch.Tensor, position: torch.Tensor, output_index: torch.Tensor, tokens: torch.Tensor | int
) -> torch.Tensor:
    """Gumbel noise float32 [R, N] for token ids [R, N], or for the ids 0 … N-1 where `tokens` is the number N."""
    if seed.is_cuda:
        return _gumbel(uniform_bits(seed, position, output_index, tokens))
    columns = tokens if isinstance(tokens, int) else tokens.shape[1]
    out = torch.empty((seed.shape[0], columns), dtype=torch.float32)
    step = max(64, CHUNK // max(1, seed.shape[0]))
    words = [_words(rows) for rows in (seed, position, output_index)]
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        ids = np.arange(start, stop, dtype=np.uint64)[None] if isinstance(tokens, int) else _ids(tokens, start, stop)
        noise = out[:, start:stop].numpy()
        np.add(_word0(*words, ids) >> np.uint64(9), 0.5, out=noise, casting="unsafe")
        noise *= np.float32(2.0**-23)
        for _ in range(2):
            np.log(noise, out=noise)
            np.negative(noise, out=noise)
    return out


def uniform_bits(
    seed: torch.Tensor, position: torch.Tensor, output_index: torch.Tensor, tokens: torch.Tensor | int
) -> torch.Tensor:
    """The words x, int64 [R, N] below 2^32, in torch on any device."""
    ids = torch.arange(tokens, device=seed.device)[None] if isinstance(tokens, int) else tokens.long()
    return _word0(*(rows.long().unsqueeze(1) for rows in (seed, position, output_index)), ids)


def _word0(seed: Any, position: Any, output_index: Any, ids: Any) -> Any:
    key = seed & MASK, (seed >> 32) & MASK
    return philox4x32(ids & MASK, position & MASK, output_index & MASK, position & 0, *key)[0]


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    uniform = (bits >> 9).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _words(rows: torch.Tensor) -> np.ndarray:
    return rows.long().numpy().view(np.uint64)[:, None]


def _ids(tokens: torch.Tensor, start: int, stop: int) -> np.ndarray:
    return tokens[:, start:stop].long().numpy().astype(np.uint64)


@jit
def gumbel(seed, position, output_index, ids):
    """Noise float32 of a tile of token ids; seed int64, position and output_index scalars or of shapes that broadcast."""
    x = philox_word(ids.to(tl.uint32), position.to(tl.uint32), output_index.to(tl.uint32), ids.to(tl.uint32) * 0, seed)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -tl.log(-tl.log(uniform))
