"""What stands between a projection to queries, keys and values and attention, in one pass: heads are scaled, given their bias,
normalised where the family does, rotated; queries go to a tensor of their own, keys and values to their pages.

    x = r · qkv[t] + b,  r = 1 / sqrt(mean(h[t]²) + eps)       the norm before the projection, whose weight is folded into W
    x = w · x / sqrt(mean(x²) + eps)                           of every head of q and of k, where `norms` are given
    (a, b) = (x[i], x[i + D/2]);  x[i] = a·cos - b·sin,  x[i + D/2] = b·cos + a·sin

Arithmetic is float32, every result is rounded once. A matrix library multiplies the residual stream h as it is, and nothing has to
write, or read again, the normalised one.

Shapes: qkv [T, (Hq + 2·Hkv) · D] contiguous, h [T, H] or None (r is 1), b [(Hq + 2·Hkv) · D] or None, norms two [D] or None, Rotation of the
T tokens, cache [num_blocks, layers, 2, Hkv, block_size, D] -> q [T, Hq · D]. bf16, fp16, fp32.
Bytes moved: 2 · T · (Hq + 2·Hkv) · D · itemsize + T · H · itemsize.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.gluon import gdc_launch_dependents, gdc_wait, has_dependent_launch
from photon_grpc.kernels.jit import jit, launches, next_power_of_2, tl
from photon_grpc.kernels.rotary.rotation import Norms, Rotation, reference

__all__ = ["launch", "reference"]


@jit
def load_heads(
    x, FIRST: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr
):  # fmt: skip
    """Both halves [HEADS_PAD, HALF_PAD] of HEADS heads from head FIRST on."""
    head, column = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    inside = (head < HEADS) & (column < HALF)
    at = (FIRST + head) * (2 * HALF) + column
    return tl.load(x + at, mask=inside, other=0.0), tl.load(x + at + HALF, mask=inside, other=0.0)


@jit
def normalised(
    first, second, bias, weight, scale, eps,
    FIRST: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Both halves of the heads scaled, with bias, normalised; float32."""
    first, second = first.to(tl.float32) * scale, second.to(tl.float32) * scale
    if bias is not None:
        added_first, added_second = load_heads(bias, FIRST, HEADS, HEADS_PAD, HALF, HALF_PAD)
        first += added_first.to(tl.float32)
        second += added_second.to(tl.float32)
    if weight is not None:
        column = tl.arange(0, HALF_PAD)[None, :]
        squares = tl.sum(first * first + second * second, axis=1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * factor * tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        second = second * factor * tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    return first, second


@jit
def store_heads(
    to, first, second, STRIDE: tl.constexpr,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Both halves of HEADS heads, STRIDE elements from one to the next."""
    head, column = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    inside = (head < HEADS) & (column < HALF)
    tl.store(to + head * STRIDE + column, first.to(to.dtype.element_ty), mask=inside)
    tl.store(to + head * STRIDE + HALF + column, second.to(to.dtype.element_ty), mask=inside)


@jit
def rotate_store_kernel(
    qkv, h, bias, q_weight, k_weight, q, pages, cos, sin, positions, slot_mapping, block_stride, eps,
    HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr, Q_HEADS: tl.constexpr, Q_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr, KV_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token; `pages` points at the layer's plane of block 0."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF_PAD)
    angle = tl.load(positions + token).to(tl.int64) * HALF + column
    c = tl.load(cos + angle, mask=column < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=column < HALF, other=0.0)[None, :]
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = qkv + token * ((Q_HEADS + 2 * KV_HEADS) * 2 * HALF)
    # Asked for before the sum over h, whose barrier nothing is moved across.
    q_a, q_b = load_heads(x, 0, Q_HEADS, Q_PAD, HALF, HALF_PAD)
    k_a, k_b = load_heads(x, Q_HEADS, KV_HEADS, KV_PAD, HALF, HALF_PAD)
    v_a, v_b = load_heads(x, Q_HEADS + KV_HEADS, KV_HEADS, KV_PAD, HALF, HALF_PAD)
    scale = 1.0
    if h is not None:
        element = tl.arange(0, HIDDEN_PAD)
        row = tl.load(h + token * HIDDEN + element, mask=element < HIDDEN, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(row * row, axis=0) / HIDDEN + eps)
    a, b = normalised(q_a, q_b, bias, q_weight, scale, eps, 0, Q_HEADS, Q_PAD, HALF, HALF_PAD)
    store_heads(
        q + token * (Q_HEADS * 2 * HALF), a * c - b * s, b * c + a * s, 2 * HALF, Q_HEADS, Q_PAD, HALF, HALF_PAD
    )
    keys = pages + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * (2 * HALF)
    a, b = normalised(k_a, k_b, bias, k_weight, scale, eps, Q_HEADS, KV_HEADS, KV_PAD, HALF, HALF_PAD)
    store_heads(keys, a * c - b * s, b * c + a * s, BLOCK_SIZE * 2 * HALF, KV_HEADS, KV_PAD, HALF, HALF_PAD)
    a, b = normalised(v_a, v_b, bias, None, scale, eps, Q_HEADS + KV_HEADS, KV_HEADS, KV_PAD, HALF, HALF_PAD)
    values = keys + KV_HEADS * BLOCK_SIZE * 2 * HALF
    store_heads(values, a, b, BLOCK_SIZE * 2 * HALF, KV_HEADS, KV_PAD, HALF, HALF_PAD)


def config(hidden: int, q_heads: int, kv_heads: int, head_dim: int, block_size: int) -> dict[str, Any]:
    """Compile-time arguments, all but PDL."""
    return {
        "HIDDEN": hidden,
        "HIDDEN_PAD": next_power_of_2(hidden),
        "Q_HEADS": q_heads,
        "Q_PAD": next_power_of_2(q_heads),
        "KV_HEADS": kv_heads,
        "KV_PAD": next_power_of_2(kv_heads),
        "HALF": head_dim // 2,
        "HALF_PAD": next_power_of_2(head_dim // 2),
        "BLOCK_SIZE": block_size,
        "num_warps": 4 if q_heads * head_dim <= 2048 else 8,
    }


def launch(
    qkv: torch.Tensor, h: torch.Tensor | None, b: torch.Tensor | None, norms: Norms | None, eps: float,
    q: torch.Tensor, cache: torch.Tensor, layer: int, rotation: Rotation,
) -> None:  # fmt: skip
    """Fills q [T, Hq · D], changes cache."""
    if not launches(qkv):
        return reference(qkv, h, b, norms, eps, q, cache, layer, rotation)
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    meta = config(1 if h is None else h.shape[1], q.shape[1] // head_dim, kv_heads, head_dim, block_size)
    pdl = has_dependent_launch(qkv.device)
    options = {"launch_pdl": True} if pdl else {}
    if qkv.shape[0]:
        rotate_store_kernel[(qkv.shape[0],)](
            qkv, h, b, *(norms or (None, None)), q, cache[:, layer], rotation.cos, rotation.sin,
            rotation.positions, rotation.slot_mapping, cache.stride(0), eps,
            PDL=pdl, **meta, **options,
        )  # fmt: skip
    return None
