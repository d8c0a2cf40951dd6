"""A packed weight as the numbers that it stands for, for the products of many rows that the matrix library multiplies.

    W = round((q - z) · s), then round(W · g) where there is a norm        (weight.py)

Shapes: as of a QuantizedWeight, arranged or not -> w [N, K] contiguous, in the dtype of the scales. bf16, fp16, fp32.
Bytes moved: (itemsize + bits / 8) · N · K.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.linear import weight
from photon_grpc.kernels.linear.weight import QuantizedWeight


def reference(quantized: QuantizedWeight, w: torch.Tensor) -> None:
    """Fill w in torch."""
    w.copy_(weight.dequantize(quantized, w.dtype))


@jit
def pair_of(words, scale, zero, pair, BITS: tl.constexpr, IS_ARRANGED: tl.constexpr, kind: tl.constexpr):
    """Return two neighbouring columns of words [R, W], pair 0, 1 … of each: [R, W, 2]."""
    PAIRS: tl.constexpr = 16 // BITS
    if IS_ARRANGED:
        low, high = number(words, pair, BITS, True), number(words, pair + PAIRS, BITS, True)
    else:
        low, high = number(words, 2 * pair, BITS, False), number(words, 2 * pair + 1, BITS, False)
    return tl.join((low - zero) * scale, (high - zero) * scale).to(kind)


@jit
def number(words, index, BITS: tl.constexpr, IS_ARRANGED: tl.constexpr):
    """Return value `index` of each word, in float32: signed with 8 bits."""
    q = words << (32 - BITS * (index + 1))
    if BITS == 8:
        return ((q ^ (-(2**31))) >> 24).to(tl.float32) if IS_ARRANGED else (q >> 24).to(tl.float32)
    else:
        return ((q >> 28) & 15).to(tl.float32)


@jit
def dequantize_kernel(
    words, scales, zeros, norm, w, num_columns,
    N: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, IS_ARRANGED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill ROWS rows and BLOCK words of columns of w per program."""
    VALUES: tl.constexpr = 32 // BITS
    kind: tl.constexpr = w.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = num_columns // VALUES
    inside = (row < N)[:, None] & (word < width)[None, :]
    at_row = row.to(tl.int64)[:, None]
    given = tl.load(words + at_row * width + word[None, :], mask=inside, other=0)
    # The columns of a word are in one group: all of it, or of the words of four threads.
    group = word * VALUES // GROUP if GROUP else word * 0
    side = group[None, :].to(tl.int64) * N + row[:, None]
    scale = tl.load(scales + side, mask=inside, other=0.0).to(tl.float32)
    if zeros is not None:
        zero = tl.load(zeros + side, mask=inside, other=0.0).to(tl.float32)
    else:
        zero = 8.0 if BITS == 4 else 0.0
    # Axes behind rows: words, or blocks of four threads' words; i, h and c of the columns, as `decode.py` has them.
    if BITS == 8:
        both = tl.join(
            pair_of(given, scale, zero, 0, BITS, IS_ARRANGED, kind),
            pair_of(given, scale, zero, 1, BITS, IS_ARRANGED, kind),
        )
        if IS_ARRANGED:
            value = both.reshape(ROWS, BLOCK // 4, 4, 2, 2).permute(0, 1, 4, 2, 3)
        else:
            value = both.permute(0, 1, 3, 2)
    else:
        first = tl.join(
            pair_of(given, scale, zero, 0, BITS, IS_ARRANGED, kind),
            pair_of(given, scale, zero, 1, BITS, IS_ARRANGED, kind),
        )
        second = tl.join(
            pair_of(given, scale, zero, 2, BITS, IS_ARRANGED, kind),
            pair_of(given, scale, zero, 3, BITS, IS_ARRANGED, kind),
        )
        all_four = tl.join(first, second)
        if IS_ARRANGED:
            value = all_four.reshape(ROWS, BLOCK // 4, 4, 2, 2, 2).permute(0, 1, 5, 4, 2, 3)
        else:
            value = all_four.permute(0, 1, 4, 3, 2)
    # A thread writes columns that are neighbours.
    value = value.reshape(ROWS, BLOCK * VALUES)
    column = tl.program_id(1) * BLOCK * VALUES + tl.arange(0, BLOCK * VALUES)
    if norm is not None:
        g = tl.load(norm + column, mask=column < num_columns, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * g[None, :]).to(kind)
    whole = (row < N)[:, None] & (column < num_columns)[None, :]
    tl.store(w + at_row * num_columns + column[None, :], value, mask=whole)


def config(quantized: QuantizedWeight) -> dict[str, Any]:
    """Return the compile-time arguments."""
    rows, kind = quantized.values.shape[0], quantized.kind
    constants = {"N": rows, "BITS": kind.BITS, "GROUP": kind.GROUP, "IS_ARRANGED": quantized.is_arranged}
    return constants | {"ROWS": 4, "BLOCK": 128, "num_warps": 4}


def launch(quantized: QuantizedWeight, w: torch.Tensor) -> None:
    """Fill w."""
    if not launches(w):
        return reference(quantized, w)
    words = quantized.values.view(torch.int32)
    meta = config(quantized)
    grid = cdiv(w.shape[0], meta["ROWS"]), cdiv(words.shape[1], meta["BLOCK"])
    dequantize_kernel[grid](words, quantized.scales, quantized.zeros, quantized.norm, w, w.shape[1], **meta)
    return None
