"""Device functions: the product of one expert's rows of W by some of its tokens, in every form of a stack.

    plain:    Σ w · x in float32, one chain over K
    packed:   the same of w = round((q - z) · s), decoded in registers
    8 bits:   (Σ q_w · q_x) · s_w · s_x; of e4m3 sums of 128 columns, added forwards; of blocks each times its scales

These are the numbers of `linear/`, where K is one slice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.jit import jit, tl


class StackOperand(NamedTuple):
    """The tensors of a Stack as kernels take them."""

    values: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None


class RowOperand(NamedTuple):
    """Rows that are multiplied, or memory for them: values [T, K]; of 8 bits their scales.

    stride: from the scales of one group of columns to those of the next.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    stride: int = 0


@jit
def packed_tile(
    weight, expert, row, in_w, start,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return the numbers [R, BK] of rows of a packed W from column `start` on."""
    values, scales, zeros = weight
    if BITS == 4:
        byte = (start // 2 + tl.arange(0, BK // 2))[None, :]
        at = values + expert * (N * K // 2) + row[:, None] * (K // 2) + byte
        packed = tl.load(at, mask=in_w & (byte < K // 2), other=0)
        q = tl.reshape(tl.join(packed & 15, packed >> 4), [row.shape[0], BK]).to(tl.float32)
    else:
        column = (start + tl.arange(0, BK))[None, :]
        at = values + expert * (N * K) + row[:, None] * K + column
        q = tl.load(at, mask=in_w & (column < K), other=0).to(tl.float32)
    PIECES: tl.constexpr = 1 if GROUP == 0 or GROUP >= BK else BK // GROUP
    NUM_GROUPS: tl.constexpr = 1 if GROUP == 0 else K // GROUP
    piece = tl.arange(0, PIECES)
    group = piece if GROUP == 0 else (start + piece * (BK // PIECES)) // GROUP
    within = expert * (NUM_GROUPS * N) + group[None, :] * N + row[:, None]
    there = in_w & (group < NUM_GROUPS)[None, :]
    q = tl.reshape(q, [row.shape[0], PIECES, BK // PIECES])
    if zeros is not None:
        q = q - tl.load(zeros + within, mask=there, other=0.0).to(tl.float32)[:, :, None]
    elif BITS == 4:
        q = q - 8.0
    q = q * tl.load(scales + within, mask=there, other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(q, [row.shape[0], BK]).to(KIND)


@jit
def expert_product(
    x, rows, has, weight, expert, row, in_w,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, EIGHT: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return float32 [R, BM], rows `row` [R] of W of an expert by rows `rows` [BM] of x where `has`; in_w [R, 1].

    EIGHT: 0: activations of 16 or 32 bits; 1: of 8 bits with scales of rows; 2: with those of 128 columns.
    """
    values, x_scales, x_stride = x
    of_x, in_x = values + rows[:, None] * K, has[:, None]
    acc = tl.zeros([row.shape[0], rows.shape[0]], tl.float32)
    if EIGHT > 0 and values.dtype.element_ty == tl.int8:
        sums = tl.zeros([row.shape[0], rows.shape[0]], tl.int32)
        for start in range(0, K, BK):
            column = (start + tl.arange(0, BK))[None, :]
            w = tl.load(weight[0] + expert * (N * K) + row[:, None] * K + column, mask=in_w & (column < K), other=0)
            tile = tl.trans(tl.load(of_x + column, mask=in_x & (column < K), other=0))
            sums = tl.dot(w, tile, sums, out_dtype=tl.int32)
        acc = sums.to(tl.float32)
    elif EIGHT > 0:
        for start in range(0, K, BK):
            column = (start + tl.arange(0, BK))[None, :]
            at = weight[0] + expert * (N * K) + row[:, None] * K + column
            w = tl.load(at, mask=in_w & (column < K), other=0.0)
            part = tl.dot(w, tl.trans(tl.load(of_x + column, mask=in_x & (column < K), other=0.0)))
            if EIGHT == 2:
                group = start // BK
                of_blocks = expert * (((K + BK - 1) // BK) * ((N + 127) // 128)) + group * ((N + 127) // 128)
                s_w = tl.load(weight[1] + of_blocks + row[:, None] // 128, mask=in_w, other=0.0)
                s_x = tl.load(x_scales + group * x_stride + rows, mask=has, other=0.0)
                acc = tl.fma(part, s_w * s_x[None, :], acc)
            else:
                acc += part
    else:
        for start in range(0, K, BK):
            column = (start + tl.arange(0, BK))[None, :]
            tile = tl.trans(tl.load(of_x + column, mask=in_x & (column < K), other=0.0))
            if BITS == 16:
                at = weight[0] + expert * (N * K) + row[:, None] * K + column
                w = tl.load(at, mask=in_w & (column < K), other=0.0)
            else:
                w = packed_tile(weight, expert, row, in_w, start, N, K, BITS, GROUP, BK, values.dtype.element_ty)
            acc = tl.dot(w, tile, acc, input_precision=PRECISION)
    if EIGHT == 1:
        acc = acc * tl.load(weight[1] + expert * N + row[:, None], mask=in_w, other=0.0)
        acc = acc * tl.load(x_scales + rows, mask=has, other=0.0)[None, :]
    return acc
