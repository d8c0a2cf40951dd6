"""From a projection to queries, keys and values for attention, in one pass.

Heads are scaled, given their bias, normalised where the family does, and rotated; queries go to a separate tensor, keys
and values to their pages.

    x = r · qkv[t] + b,  r = 1 / sqrt(mean(h[t]²) + eps)       the norm before the projection, its weight folded into W
    x = w · x / sqrt(mean(x²) + eps)                           of every head of q and of k, where `norms` are given
    (a, b) = (x[i], x[i + R/2]);  x[i] = a·cos - b·sin,  x[i + R/2] = b·cos + a·sin        of the first R of D numbers

Arithmetic is float32, every result is rounded once. A matrix library multiplies the residual stream h as it is, and
nothing has to write, or read again, the normalised one. Where qkv is the sums of slices of K in float32, they are added
in order, and in bf16 rounded once before all else, as a product in one slice is.

Shapes: qkv [T, (Hq + 2·Hkv) · D] or [slices, T, …], contiguous, h [T, H] or None (r is 1), its partial sums of squares
(squares.py) or None, b [(Hq + 2·Hkv) · D] or None, norms two [D] or
None, Rotation of the T tokens, cache [num_blocks, layers, 2, Hkv, block_size, D] -> q [T, Hq · D]. bf16, fp16, fp32.
Bytes moved: 2 · T · (Hq + 2·Hkv) · D · itemsize + T · H · itemsize.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import add_slices, rotated, tree_sum
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import jit, launches, tl
from photon_grpc.kernels.lang.page_scales import PageScales, page_numbers, quantized
from photon_grpc.kernels.lang.squares import row_scale
from photon_grpc.kernels.rotary.rotary import HeadTile, head_tile


class Rotation(NamedTuple):
    """The rotation of all layers of a step.

    cos, sin: float32 [max_position, R/2], R the numbers of a head that are rotated. positions, slot_mapping: int64 [M].
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


#: Weights [D] of the norms of query and of key heads.
Norms = tuple[torch.Tensor, torch.Tensor]


class HeadOutput(NamedTuple):
    """The outputs of one layer: q [T, Hq · D], and `layer` of cache [num_blocks, layers, 2, Hkv, block_size, D].

    Also the norms and the rotation of heads on their way there, and the constants of pages of 8 bits.
    """

    q: torch.Tensor
    cache: torch.Tensor
    layer: int
    rotation: Rotation
    norms: Norms | None = None
    scales: PageScales | None = None

    @property
    def is_behind(self) -> bool:
        """Whether heads have what no tile of a product ends with: norms, or a part that is not rotated."""
        return self.norms is not None or 2 * self.rotation.cos.shape[1] != self.cache.shape[-1]


def reference(
    qkv: torch.Tensor, h: torch.Tensor | None, b: torch.Tensor | None, eps: float, out: HeadOutput,
    partial: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill q and change cache in torch."""
    q, cache, layer, rotation, norms, scales = out
    kv_heads, head_dim = cache.shape[3], cache.shape[5]
    x = qkv.float() if qkv.dim() == 2 else functools.reduce(torch.add, qkv)
    if q.dtype == torch.bfloat16:
        x = x.to(q.dtype).float()
    if h is not None:
        x = x * torch.rsqrt(squares.total_reference(h) / h.shape[1] + eps)[:, None]
    if b is not None:
        x = x + b.float()
    heads = x.view(x.shape[0], -1, head_dim)
    queries, keys, values = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        queries, keys = (
            part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * weight.float()
            for part, weight in zip((queries, keys), norms, strict=True)
        )
    cos, sin = (table[rotation.positions].unsqueeze(1) for table in (rotation.cos, rotation.sin))
    queries, keys = (_rotated(part, cos, sin) for part in (queries, keys))
    q.copy_(queries.reshape(q.shape))
    slot = rotation.slot_mapping
    stored, block_size = torch.stack((keys, values), dim=1), cache.shape[4]
    if scales is None:
        stored = stored.to(cache.dtype)
    else:
        stored, cache = quantized(stored, scales, slot, block_size).view(torch.uint8), cache.view(torch.uint8)
    cache[:, layer][slot // block_size, :, :, slot % block_size] = stored


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = heads.split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class RowSizes(NamedTuple):
    """Sizes of rows: h [T, HIDDEN], the heads of queries, keys and values in a row of qkv, tokens of a block.

    LEVELS: as of squares.py. SLICES: of qkv, whose sums are rounded to bf16 if ROUNDS.
    """

    HIDDEN: int
    LEVELS: int
    Q: HeadTile
    K: HeadTile
    V: HeadTile
    BLOCK_SIZE: int
    SLICES: int = 1
    ROUNDS: bool = False


@jit
def halves(column, HEADS: tl.constexpr):
    """Return which numbers of a head pair `column` has: those that are rotated come first, then pairs of the rest."""
    if HEADS.ROTATED == HEADS.HALF:
        return column, HEADS.HALF + column
    else:
        is_rotated = column < HEADS.ROTATED
        first = tl.where(is_rotated, column, HEADS.ROTATED + column)
        return first, tl.where(is_rotated, HEADS.ROTATED, HEADS.HALF) + column


@jit
def load_heads(x, stride, HEADS: tl.constexpr, SIZES: tl.constexpr):
    """Load both halves [COUNT_PAD, HALF_PAD] of the heads of a row in float32; `stride` is that of a slice."""
    head, column = tl.arange(0, HEADS.COUNT_PAD)[:, None], tl.arange(0, HEADS.HALF_PAD)[None, :]
    inside = (head < HEADS.COUNT) & (column < HEADS.HALF)
    x += (HEADS.FIRST + head) * (2 * HEADS.HALF)
    a, b = halves(column, HEADS)
    return load_sums(x + a, stride, inside, SIZES), load_sums(x + b, stride, inside, SIZES)


@jit
def load_sums(at, stride, inside, SIZES: tl.constexpr):
    """Load the sums of slices and add them, rounded if ROUNDS."""
    total = add_slices(at, stride, inside, SIZES.SLICES)
    if SIZES.ROUNDS:
        total = total.to(tl.bfloat16).to(tl.float32)
    return total


@jit
def normalised(first, second, bias, norm, scale, HEADS: tl.constexpr):
    """Return both halves of the heads scaled, with bias, normalised, in float32. norm: weight or None, eps."""
    weight, eps = norm
    if bias is not None:
        head, column = tl.arange(0, HEADS.COUNT_PAD)[:, None], tl.arange(0, HEADS.HALF_PAD)[None, :]
        inside = (head < HEADS.COUNT) & (column < HEADS.HALF)
        at = bias + (HEADS.FIRST + head) * (2 * HEADS.HALF)
        a, b = halves(column, HEADS)
        first = tl.fma(first, scale, tl.load(at + a, mask=inside, other=0.0).to(tl.float32))
        second = tl.fma(second, scale, tl.load(at + b, mask=inside, other=0.0).to(tl.float32))
    else:
        first, second = first * scale, second * scale
    if weight is not None:
        column = tl.arange(0, HEADS.HALF_PAD)[None, :]
        inside = column < HEADS.HALF
        a, b = halves(column, HEADS)
        weight_first = tl.load(weight + a, mask=inside, other=0.0).to(tl.float32)
        weight_second = tl.load(weight + b, mask=inside, other=0.0).to(tl.float32)
        squares = tree_sum(tl.fma(first, first, second * second))
        factor = tl.rsqrt(squares / (2 * HEADS.HALF) + eps)[:, None]
        first, second = first * factor * weight_first, second * factor * weight_second
    return first, second


@jit
def store_heads(to, first, second, STRIDE: tl.constexpr, HEADS: tl.constexpr):
    """Store both halves of the heads, STRIDE elements from one head to the next."""
    head, column = tl.arange(0, HEADS.COUNT_PAD)[:, None], tl.arange(0, HEADS.HALF_PAD)[None, :]
    inside = (head < HEADS.COUNT) & (column < HEADS.HALF)
    a, b = halves(column, HEADS)
    tl.store(to + head * STRIDE + a, first.to(to.dtype.element_ty), mask=inside)
    tl.store(to + head * STRIDE + b, second.to(to.dtype.element_ty), mask=inside)


@jit
def page_heads(first, second, scales, PLANE: tl.constexpr, is_real, HEADS: tl.constexpr):
    """Return both halves of the heads of keys (PLANE 0) or values (1) as pages hold them; padding is not counted."""
    if scales is not None:
        head, column = tl.arange(0, HEADS.COUNT_PAD)[:, None], tl.arange(0, HEADS.HALF_PAD)[None, :]
        counted = (head < HEADS.COUNT) & (column < HEADS.HALF) & is_real
        inverse = tl.load(scales.inverse + PLANE * HEADS.COUNT + head, mask=head < HEADS.COUNT, other=1.0)
        if PLANE == 0 and scales.offset is not None:
            at, inside = scales.offset + head * (2 * HEADS.HALF), (head < HEADS.COUNT) & (column < HEADS.HALF)
            of_first, of_second = halves(column, HEADS)
            first = first - tl.load(at + of_first, mask=inside, other=0.0)
            second = second - tl.load(at + of_second, mask=inside, other=0.0)
        first = page_numbers(first, inverse, scales.saturated, counted)
        second = page_numbers(second, inverse, scales.saturated, counted)
    return first, second


@jit
def rotate_store_kernel(
    qkv, h, partial, bias, norms, q, pages, rotation, scales, slice_stride, block_stride, eps,
    SIZES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate and store one token per program; `pages` is at the layer's part of block 0.

    norms: weights or None. scales: PageScales or None.
    """
    Q: tl.constexpr = SIZES.Q
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    HEAD_DIM: tl.constexpr = 2 * Q.HALF
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, Q.HALF_PAD)
    # What is not rotated has the angle 0.
    angle = tl.load(rotation.positions + token).to(tl.int64) * Q.ROTATED + column
    c = tl.load(rotation.cos + angle, mask=column < Q.ROTATED, other=1.0)[None, :]
    s = tl.load(rotation.sin + angle, mask=column < Q.ROTATED, other=0.0)[None, :]
    slot = tl.load(rotation.slot_mapping + token).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = qkv + token * ((V.FIRST + V.COUNT) * HEAD_DIM)
    # Loaded before the sum over h, since the compiler moves nothing across its barrier.
    q_a, q_b = load_heads(x, slice_stride, Q, SIZES)
    k_a, k_b = load_heads(x, slice_stride, K, SIZES)
    v_a, v_b = load_heads(x, slice_stride, V, SIZES)
    scale = 1.0
    if h is not None:
        scale = row_scale(token, h, partial, eps, SIZES.HIDDEN, SIZES.LEVELS)
    a, b = normalised(q_a, q_b, bias, (norms[0], eps), scale, Q)
    a, b = rotated(a, b, c, s)
    store_heads(q + token * (Q.COUNT * HEAD_DIM), a, b, HEAD_DIM, Q)
    keys = pages + (slot // SIZES.BLOCK_SIZE) * block_stride + (slot % SIZES.BLOCK_SIZE) * HEAD_DIM
    a, b = normalised(k_a, k_b, bias, (norms[1], eps), scale, K)
    a, b = rotated(a, b, c, s)
    is_real = slot >= SIZES.BLOCK_SIZE
    a, b = page_heads(a, b, scales, 0, is_real, K)
    store_heads(keys, a, b, SIZES.BLOCK_SIZE * HEAD_DIM, K)
    a, b = normalised(v_a, v_b, bias, (None, eps), scale, V)
    a, b = page_heads(a, b, scales, 1, is_real, V)
    store_heads(keys + K.COUNT * SIZES.BLOCK_SIZE * HEAD_DIM, a, b, SIZES.BLOCK_SIZE * HEAD_DIM, V)


@functools.cache
def config(
    hidden: int, q_heads: int, kv_heads: int, head_dim: int, block_size: int, slices: int = 1, rounds: bool = False,
    rotated: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time arguments, all but PDL. rotated: pairs of a head, 0: all."""
    heads = ((q_heads, 0), (kv_heads, q_heads), (kv_heads, q_heads + kv_heads))
    tiles = [head_tile(count, head_dim, first)._replace(ROTATED=rotated or head_dim // 2) for count, first in heads]
    sizes = RowSizes(hidden, squares.levels(hidden), *tiles, block_size, slices, rounds)
    return {"SIZES": sizes, "num_warps": 4 if q_heads * head_dim <= 2048 else 8}


def launch(
    qkv: torch.Tensor, h: torch.Tensor | None, b: torch.Tensor | None, eps: float, out: HeadOutput,
    partial: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Fill q [T, Hq · D] and change cache."""
    if not launches(qkv):
        return reference(qkv, h, b, eps, out, partial)
    q, cache, layer, rotation, norms, scales = out
    _, _, _, kv_heads, block_size, head_dim = cache.shape
    sums = qkv if qkv.dim() == 3 else qkv[None]
    hidden = 16 if h is None else h.shape[1]
    constants = config(
        hidden, q.shape[1] // head_dim, kv_heads, head_dim, block_size, sums.shape[0], q.dtype == torch.bfloat16,
        rotation.cos.shape[1],
    )  # fmt: skip
    if q.shape[0]:
        rotate_store_kernel[(q.shape[0],)](
            sums, h, partial, b, norms or (None, None), q, cache[:, layer], rotation, scales,
            sums.stride(0), cache.stride(0), eps, **constants, **dependent_launch(qkv.device),
        )  # fmt: skip
    return None
