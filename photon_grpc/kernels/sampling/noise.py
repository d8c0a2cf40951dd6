"""Sampling noise that depends only on what is sampled: Gumbel noise keyed by (seed, position, output, token).

    x = Philox4x32-10(key = seed (low, high), counter = (token id, position, output index, 0)), word 0
    u = ((x >> 9) + 1/2) · 2^-23,   gumbel = -log(-log(u))

Philox4x32-10 is the counter-based generator of Salmon, Moraes, Dror and Shaw (SC 2011): ten rounds of two 32 x 32 -> 64
bit products over a counter of four 32-bit words, keyed by two words.

argmax(logits / temperature + gumbel) is a sample of the softmax, and the same sample alone, in any batch, after any
preemption and for any subset of tokens that a filter kept.

23 bits, because float32 holds (x >> 9) + 1/2 exactly, so 0 < u < 1 strictly. (With 24 bits the largest x rounds to
u = 1 and its token gets infinite noise, once in 2^24 tokens: every hundred samples of a vocabulary of 128k.)

Shapes: seed, position, output_index [R] integers (seed int64 holds the bit pattern of a uint64), token ids [R, N]
-> float32 [R, N]. The bits of u are equal on every device; the logarithms may differ in the last place.
A kernel makes noise where it is added: `gumbel`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from photon_grpc.kernels.lang.jit import jit, tl

MULTIPLIER_A = 0xD2511F53
MULTIPLIER_B = 0xCD9E8D57
WEYL_A = 0x9E3779B9
WEYL_B = 0xBB67AE85
MASK = 0xFFFFFFFF

# Bounds of the noise: a token whose scaled logit is MAX_GUMBEL - MIN_GUMBEL below another's can never win.
MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-24)))
MIN_GUMBEL = -math.log(24 * math.log(2.0))

# Words made at a time, so that what ten rounds read and write stays in the second-level cache.
CHUNK = 16384


def reference(
    seed: torch.Tensor, position: torch.Tensor, output_index: torch.Tensor, tokens: torch.Tensor | int
) -> torch.Tensor:
    """Return noise float32 [R, N] for token ids [R, N], or for ids 0 … N-1 where `tokens` is the number N."""
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
    """Return the words x, int64 [R, N] below 2^32, in torch on any device."""
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


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Return four words from a counter and a key, all 32-bit words in 64-bit integers, of shapes that broadcast.

    Takes NumPy uint64 arrays or torch int64 tensors alike: a product wraps to the same 64 bits signed or unsigned, and
    the mask after every shift drops the sign bits that a signed shift brings in.
    """
    for _ in range(10):
        product_a, product_b = c0 * MULTIPLIER_A, c2 * MULTIPLIER_B
        c0 = ((product_b >> 32) ^ c1 ^ k0) & MASK
        c2 = ((product_a >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = product_b & MASK, product_a & MASK
        k0, k1 = (k0 + WEYL_A) & MASK, (k1 + WEYL_B) & MASK
    return c0, c1, c2, c3


@jit
def philox_word(c0, c1, c2, c3, seed):
    """Return word 0, uint32, of a counter of integers that broadcast, under a 64-bit seed = key (lo, hi)."""
    key = seed.to(tl.uint64, bitcast=True)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox_impl(c0, c1, c2, c3, low, high)
    return word


@jit
def gumbel(seed, position, output_index, ids):
    """Return noise float32 for a tile of token ids; int64 seed, position and output_index broadcast."""
    x = philox_word(ids.to(tl.uint32), position.to(tl.uint32), output_index.to(tl.uint32), ids.to(tl.uint32) * 0, seed)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -tl.log(-tl.log(uniform))
