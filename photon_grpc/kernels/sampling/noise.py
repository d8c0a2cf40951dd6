"""Sampling noise that depends on nothing but what is sampled: Gumbel noise keyed by (seed, position, output, token).

    x = Philox4x32-10(key = seed (low, high), counter = (token id, position, output index, 0)), word 0
    u = ((x >> 9) + 1/2) · 2^-23,   gumbel = -log(-log(u))

argmax(logits / temperature + gumbel) is a draw from the softmax, and the same draw alone, in any batch, after any
preemption and for any subset of tokens that a filter kept.

23 bits, because float32 holds (x >> 9) + 1/2 exactly, so 0 < u < 1 strictly. (With 24 bits the largest x rounds to
u = 1 and its token gets infinite noise, once in 2^24 tokens: every hundred draws from a vocabulary of 128k.)

Shapes: seed, position, output_index [R] integers (seed int64 holds the bit pattern of a uint64), token ids [R, N]
-> float32 [R, N]. The bits of u are equal on every device; the logarithms may differ in the last place.
Bytes moved: 4 · R · N written, and the ids read where they are given.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.sampling.gumbel import MAX_GUMBEL, MIN_GUMBEL, gumbel, reference, uniform_bits

__all__ = ["MAX_GUMBEL", "MIN_GUMBEL", "launch", "reference", "uniform_bits"]


@jit
def noise_kernel(seed, position, output_index, tokens, out, num_columns, tokens_stride, BLOCK: tl.constexpr):
    """out [R, num_columns]; one program for BLOCK columns of one row."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    ids = column
    if tokens is not None:
        ids = tl.load(tokens + row.to(tl.int64) * tokens_stride + column, mask=inside, other=0)
    noise = gumbel(tl.load(seed + row), tl.load(position + row), tl.load(output_index + row), ids)
    tl.store(out + row.to(tl.int64) * num_columns + column, noise, mask=inside)


def config() -> dict[str, Any]:
    """Compile-time arguments."""
    return {"BLOCK": 1024, "num_warps": 4}


def launch(
    seed: torch.Tensor, position: torch.Tensor, output_index: torch.Tensor, tokens: torch.Tensor | int
) -> torch.Tensor:
    """Gumbel noise float32 [R, N]; see `reference`."""
    if not launches(seed):
        return reference(seed, position, output_index, tokens)
    columns = tokens if isinstance(tokens, int) else tokens.shape[1]
    out = torch.empty((seed.shape[0], columns), dtype=torch.float32, device=seed.device)
    ids, stride = (None, 0) if isinstance(tokens, int) else (tokens, tokens.stride(0))
    meta = config()
    if out.numel():
        grid = (seed.shape[0], cdiv(columns, meta["BLOCK"]))
        noise_kernel[grid](seed, position, output_index, ids, out, columns, stride, **meta)
    return out
