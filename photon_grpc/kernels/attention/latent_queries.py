"""From a projection to absorbed queries and to latents in their pages, in one pass.

    x = r · sums[t],  r = 1 / sqrt(mean(h[t]²) + eps)          the norm before the projection, its weight folded into W
    q[t, h] = round(x_plain) W_k[h]  beside  rotated x         of every head of queries, one chain over P
    page[t] = w · c / sqrt(mean(c²) + latent_eps)  beside  rotated r        of latents

Arithmetic is float32, every result is rounded once, x_plain beside them. Sums of slices of K are added in order, and in
bf16 rounded once before all else.

Shapes: sums [T, Hq · (P + N) + R + N] or [slices, T, …], partial sums of squares of h (squares.py), weight
[Hq · (P + V), R], of which each head's first P rows are W_k, w [R], Rotation with tables [max_position, N / 2], pages
[num_blocks, layers, 1, 1, block_size, R + N] -> q [T, Hq · (R + N)]. bf16, fp16, fp32.
Bytes moved: the weight, and twice T · Hq · (R + N).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import add_slices, rotated, tree_sum
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.rotary.rotate_store import Rotation


class LatentOutput(NamedTuple):
    """The outputs of one layer, q and `layer` of pages, and what makes them.

    norm: weight and eps of that of latents. weight: W_k with W_v. plain: P.
    """

    q: torch.Tensor
    pages: torch.Tensor
    layer: int
    rotation: Rotation
    norm: tuple[torch.Tensor, float]
    weight: torch.Tensor
    plain: int


class QueryTile(NamedTuple):
    """The constants of a program: BM tokens of a head, BC columns of its latent; PARTS: of all columns."""

    HIDDEN: int
    LEVELS: int
    NUM_HEADS: int
    PLAIN: int
    PLAIN_PAD: int
    ROTATED: int
    HALF_PAD: int
    RANK: int
    RANK_PAD: int
    VALUE: int
    BLOCK_SIZE: int
    SLICES: int
    ROUNDS: bool
    BM: int
    BC: int
    PARTS: int
    PRECISION: str = "ieee"


def reference(sums: torch.Tensor, h: torch.Tensor, eps: float, out: LatentOutput) -> None:
    """Fill out.q and change out.pages in torch."""
    q, pages, layer, rotation, norm, weight, plain = out
    rank, half = weight.shape[1], rotation.cos.shape[1]
    x = sums.float() if sums.dim() == 2 else functools.reduce(torch.add, sums)
    if q.dtype == torch.bfloat16:
        x = x.to(q.dtype).float()
    x = x * torch.rsqrt(squares.total_reference(h) / h.shape[1] + eps)[:, None]
    cos, sin = rotation.cos[rotation.positions], rotation.sin[rotation.positions]
    heads, latent, key = x.split([x.shape[1] - rank - 2 * half, rank, 2 * half], dim=1)
    heads = heads.view(len(x), -1, plain + 2 * half)
    of_keys = weight.view(heads.shape[1], -1, rank)[:, :plain].float()
    absorbed = torch.einsum("thp,hpr->thr", heads[..., :plain].to(q.dtype).float(), of_keys)
    turned = _rotated(heads[..., plain:], cos[:, None], sin[:, None])
    q.copy_(torch.cat((absorbed, turned), -1).reshape(q.shape))
    scale = torch.rsqrt(latent.square().mean(-1, keepdim=True) + norm[1])
    kept = torch.cat((latent * scale * norm[0].float(), _rotated(key, cos, sin)), -1)
    block_size, slot = pages.shape[4], rotation.slot_mapping
    pages[:, layer, 0, 0][slot // block_size, slot % block_size] = kept.to(pages.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@jit
def load_sums(at, stride, inside, C: tl.constexpr):
    """Load the sums of slices and add them, rounded if ROUNDS."""
    total = add_slices(at, stride, inside, C.SLICES)
    if C.ROUNDS:
        total = total.to(tl.bfloat16).to(tl.float32)
    return total


@jit
def scales_of(partial, token, has, eps, C: tl.constexpr):
    """Return the factor of the norm before the projection, of each token."""
    group = tl.arange(0, 2**C.LEVELS)
    inside = has[:, None] & (group < C.HIDDEN // 16)[None, :]
    sums = tl.load(partial + token.to(tl.int64)[:, None] * (C.HIDDEN // 16) + group[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tree_sum(sums) / C.HIDDEN + eps)


@jit
def turn(x, to, stride, rotation, token, has, scale, C: tl.constexpr):
    """Rotate the pairs at x of each token [BM, 1], and store them at `to`."""
    column = tl.arange(0, C.HALF_PAD)[None, :]
    inside = has[:, None] & (column < C.ROTATED // 2)
    position = tl.load(rotation.positions + token, mask=has, other=0).to(tl.int64)
    angle = position[:, None] * (C.ROTATED // 2) + column
    cos = tl.load(rotation.cos + angle, mask=inside, other=0.0)
    sin = tl.load(rotation.sin + angle, mask=inside, other=0.0)
    a = load_sums(x + column, stride, inside, C) * scale[:, None]
    b = load_sums(x + C.ROTATED // 2 + column, stride, inside, C) * scale[:, None]
    a, b = rotated(a, b, cos, sin)
    tl.store(to + column, a.to(to.dtype.element_ty), mask=inside)
    tl.store(to + C.ROTATED // 2 + column, b.to(to.dtype.element_ty), mask=inside)


@jit
def absorb(sums, partial, weight, q, rotation, num_tokens, slice_stride, eps, C: tl.constexpr, PDL: tl.constexpr):
    """Write BC columns of one head of BM tokens, and with the first of them what is rotated of it."""
    head, part = tl.program_id(1), tl.program_id(2)
    plain, column = tl.arange(0, C.PLAIN_PAD), part * C.BC + tl.arange(0, C.BC)
    at = weight + head.to(tl.int64) * ((C.PLAIN + C.VALUE) * C.RANK) + plain[:, None] * C.RANK + column[None, :]
    w = tl.load(at, mask=(plain < C.PLAIN)[:, None] & (column < C.RANK)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    has = token < num_tokens
    row = token.to(tl.int64)[:, None]
    x = sums + row * (C.NUM_HEADS * (C.PLAIN + C.ROTATED) + C.RANK + C.ROTATED) + head * (C.PLAIN + C.ROTATED)
    numbers = load_sums(x + plain[None, :], slice_stride, has[:, None] & (plain < C.PLAIN)[None, :], C)
    scale = scales_of(partial, token, has, eps, C)
    numbers = (numbers * scale[:, None]).to(q.dtype.element_ty)
    to = q + (row * C.NUM_HEADS + head) * (C.RANK + C.ROTATED)
    absorbed = tl.dot(numbers, w, input_precision=C.PRECISION).to(q.dtype.element_ty)
    tl.store(to + column[None, :], absorbed, mask=has[:, None] & (column < C.RANK)[None, :])
    if part == 0:
        turn(x + C.PLAIN, to + C.RANK, slice_stride, rotation, token, has, scale, C)


@jit
def keep(
    sums, partial, norm, pages, rotation, num_tokens, slice_stride, block_stride, eps, latent_eps,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the latents of one of the PARTS of BM tokens to their pages."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    SHARE: tl.constexpr = C.BM // C.PARTS
    part = tl.program_id(2)
    token = tl.program_id(0) * C.BM + part * SHARE + tl.arange(0, SHARE)
    has = (token < num_tokens) & (part < C.PARTS)
    column = tl.arange(0, C.RANK_PAD)
    inside = has[:, None] & (column < C.RANK)[None, :]
    x = sums + token.to(tl.int64)[:, None] * (C.NUM_HEADS * (C.PLAIN + C.ROTATED) + C.RANK + C.ROTATED)
    x += C.NUM_HEADS * (C.PLAIN + C.ROTATED)
    numbers = load_sums(x + column[None, :], slice_stride, inside, C)
    scale = scales_of(partial, token, has, eps, C)
    slot = tl.load(rotation.slot_mapping + token, mask=has, other=0).to(tl.int64)
    numbers = numbers * scale[:, None]
    factor = tl.rsqrt(tree_sum(numbers * numbers) / C.RANK + latent_eps)
    w = tl.load(norm + column, mask=column < C.RANK, other=0.0).to(tl.float32)
    kept = (numbers * factor[:, None] * w[None, :]).to(pages.dtype.element_ty)
    to = pages + slot // C.BLOCK_SIZE * block_stride + slot % C.BLOCK_SIZE * (C.RANK + C.ROTATED)
    tl.store(to[:, None] + column[None, :], kept, mask=inside)
    turn(x + C.RANK, to[:, None] + C.RANK, slice_stride, rotation, token, has, scale, C)


@jit
def query_kernel(
    sums, partial, weight, norm, q, pages, rotation, num_tokens, slice_stride, block_stride, eps, latent_eps,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write BC columns of a head of BM tokens per program; behind the last head the latents of some of them.

    `pages` is at the layer's part of block 0.
    """
    if tl.program_id(1) < C.NUM_HEADS:
        absorb(sums, partial, weight, q, rotation, num_tokens, slice_stride, eps, C, PDL)
    else:
        keep(
            sums, partial, norm, pages, rotation, num_tokens, slice_stride, block_stride, eps, latent_eps, C, PDL
        )  # fmt: skip


def tile_of(num_tokens: int, hidden: int, slices: int, out: LatentOutput) -> QueryTile:
    """Return the tile of a step of so many tokens."""
    num_rows, rank = out.weight.shape
    block_size, width = out.pages.shape[4:]
    num_heads, rotated_size = out.q.shape[1] // width, width - rank
    is_half, rank_pad = out.q.element_size() == 2, max(16, next_power_of_2(rank))
    of_tokens = 64 if num_tokens > 64 and is_half else 16
    columns = min(64 if of_tokens == 16 else 128, rank_pad)
    return QueryTile(
        hidden, squares.levels(hidden), num_heads, out.plain, max(16, next_power_of_2(out.plain)), rotated_size,
        next_power_of_2(rotated_size // 2), rank, rank_pad, num_rows // num_heads - out.plain, block_size, slices,
        out.q.dtype == torch.bfloat16, of_tokens, columns, min(of_tokens, rank_pad // columns),
    )  # fmt: skip


def launch(sums: torch.Tensor, h: torch.Tensor, partial: torch.Tensor, eps: float, out: LatentOutput) -> None:
    """Fill out.q [T, Hq · (R + N)] and change out.pages; `partial` is of h [T, H]."""
    if not launches(sums):
        return reference(sums, h, eps, out)
    found = sums if sums.dim() == 3 else sums[None]
    num_tokens, pages = out.q.shape[0], out.pages
    tile = tile_of(num_tokens, h.shape[1], found.shape[0], out)
    options: dict[str, Any] = {"C": tile, "num_warps": 4, **dependent_launch(sums.device)}
    if num_tokens:
        grid = cdiv(num_tokens, tile.BM), tile.NUM_HEADS + 1, tile.RANK_PAD // tile.BC
        query_kernel[grid](
            found, partial, out.weight, out.norm[0], out.q, pages[:, out.layer], out.rotation, num_tokens,
            found.stride(0), pages.stride(0), eps, out.norm[1], **options,
        )  # fmt: skip
    return None
