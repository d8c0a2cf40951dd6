"""Attention over pages of latents: one vector a token that all heads share, which is both key and value.

    s[h, n] = scale · q[t, h] · c[n]          q [T, Hq, R + P], c [R + P]: R numbers of keys and values, P rotated ones
    out[t, h] = Σ_n softmax(s[h])[n] · c[n, :R]

Queries are absorbed: their plain part was multiplied by the weight that expands c to keys, and what expands c to values
comes behind. So prompts and single tokens are one formula, and a row has the same bits in any company: keys are added
in lanes of LANE positions, counted from position 0, each on its own, and lanes are merged in their order. Where rows
are short (decode) lanes are programs of their own and `latent_values.py` merges them; else one program does both
(`latent_lanes.py`; on Hopper `latent_ring.py`, with a few tokens of a row).

Shapes: q [T, Hq, R + P], pages [num_blocks, layers, 1, 1, block_size, R + P] -> out [T, Hq, R]. bf16, fp16, fp32.
Bytes moved: a row's context · (R + P) · itemsize for each 16 heads of one or two of its tokens.
"""

from __future__ import annotations

import functools
import itertools

import torch

from photon_grpc.kernels.attention import latent_values
from photon_grpc.kernels.attention.latent_lanes import LatentTile, latent_kernel
from photon_grpc.kernels.attention.latent_ring import descriptors, latent_ring_kernel, num_warps
from photon_grpc.kernels.attention.latent_values import LaneParts
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait, has_wgmma
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, num_multiprocessors, tl

#: Keys that are added on their own, and those of a step of a lane.
LANE, STEP = 256, 32
#: Heads of a program, and tokens of one of `latent_ring.py` where rows are long.
HEADS, TOKENS = 16, 2
#: Rows with at most so many queries have programs for their lanes.
SHORT = 8


def write_reference(latent: torch.Tensor, pages: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    """Write latent [T, R + P] to its slots in torch: changes pages."""
    block_size = pages.shape[4]
    block = slot_mapping // block_size
    pages[:, layer, 0, 0][block, slot_mapping - block * block_size] = latent


def reference(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, rank: int,
    dtype: torch.dtype = torch.float,
) -> torch.Tensor:  # fmt: skip
    """Return out in torch, summed in `dtype`; zeros for tokens that belong to no row."""
    out = q.new_zeros(*q.shape[:2], rank)
    starts, contexts = meta.query_start.tolist(), meta.context_len.tolist()
    for row, (start, stop) in enumerate(itertools.pairwise(starts)):
        context, count = contexts[row], stop - start
        if not count or not context:
            continue
        blocks = meta.block_tables[row, : cdiv(context, pages.shape[4])].long()
        latents = pages[blocks, layer, 0, 0].flatten(0, 1)[:context].to(dtype)
        scores = torch.einsum("thc,nc->htn", q[start:stop].to(dtype) * meta.scale, latents)
        position = torch.arange(context - count, context, device=q.device)
        hidden = torch.arange(context, device=q.device) > position[:, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        out[start:stop] = (weights @ latents[:, :rank]).transpose(0, 1).to(q.dtype)
    return out


@jit
def write_latent_kernel(
    latent, pages, slot_mapping, block_stride, layer_offset, token_stride,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the latent of one token per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    to = pages + slot // BLOCK_SIZE * block_stride + layer_offset + slot % BLOCK_SIZE * WIDTH
    tl.store(to + column, tl.load(latent + token * token_stride + column, mask=inside), mask=inside)


def tile_of(spec: AttentionSpec, pages: torch.Tensor, num_rows: int, *, has_long_rows: bool) -> LatentTile:
    """Return the cut of programs."""
    rank, (block_size, width) = spec.value_width, pages.shape[4:]
    return LatentTile(
        spec.num_heads, rank, width - rank, max(16, next_power_of_2(rank)), max(16, next_power_of_2(width - rank)),
        block_size, next_power_of_2(num_rows), LANE, STEP, HEADS, TOKENS if has_long_rows else 1,
    )  # fmt: skip


def options(dtype: torch.dtype) -> dict[str, int]:
    """Return the warps of a program of `latent_kernel`, and its steps in flight."""
    return {"num_warps": 8, "num_stages": 2 if dtype.itemsize == 2 else 1}


class TorchLatents:
    """Attention over latents in torch."""

    def __init__(
        self, spec: AttentionSpec, meta: AttentionMetadata, pages: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._spec, self._meta, self._pages, self._slots = spec, meta, pages, slot_mapping

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        """Write the latents k [T, 1, R + P]; v is a part of them."""
        write_reference(k[:, 0], self._pages, layer, self._slots)

    def attend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        dtype = torch.promote_types(self._spec.dtype, torch.float)
        found = reference(q, self._pages, layer, self._meta, self._spec.value_width, dtype)
        return found if out is None else out.copy_(found)

    def values(self, q: torch.Tensor, layer: int, weight: torch.Tensor, plain: int, out: torch.Tensor) -> None:
        """Fill out [T, Hq, V] with what `attend` returns, expanded by `latent_values.py`."""
        dtype = self._spec.dtype
        out.copy_(latent_values.reference(self.attend(q, layer).to(dtype), weight.to(dtype), plain))


class KernelLatents(TorchLatents):
    """Attention over latents by kernels."""

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        """Write the latents k [T, 1, R + P]; v is a part of them."""
        pages, width = self._pages, k.shape[2]
        if k.shape[0]:
            write_latent_kernel[(k.shape[0],)](
                k, pages, self._slots, pages.stride(0), layer * pages.stride(1), k.stride(0),
                WIDTH=width, WIDTH_PAD=next_power_of_2(width), BLOCK_SIZE=pages.shape[4], num_warps=4,
                **dependent_launch(k.device),
            )  # fmt: skip

    def attend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(*q.shape[:2], self._spec.value_width, dtype=q.dtype, device=q.device)
        parts = self._launch(q, layer, out)
        if parts is not None:
            latent_values.launch(None, parts, None, 0, out)
        return out

    def values(self, q: torch.Tensor, layer: int, weight: torch.Tensor, plain: int, out: torch.Tensor) -> None:
        """Fill out [T, Hq, V] with what `attend` returns, expanded by `latent_values.py`."""
        attended = torch.empty(0 if self._splits(q) else q.shape[0], *self._shape, dtype=q.dtype, device=q.device)
        parts = self._launch(q, layer, attended)
        latent_values.launch(attended, parts, weight, plain, out)

    @property
    def _shape(self) -> tuple[int, int]:
        return self._spec.num_heads, self._spec.value_width

    def _splits(self, q: torch.Tensor) -> bool:
        """Return whether lanes have programs of their own: rows are short, and kernels run."""
        return q.shape[0] > 0 and self._meta.max_query_len <= SHORT and self._meta.context_len.shape[0] > 0

    def _launch(self, q: torch.Tensor, layer: int, out: torch.Tensor) -> LaneParts | None:
        """Return the parts of lanes, or fill out [T, Hq, R] and return None."""
        spec, meta, pages, tables = self._spec, self._meta, self._pages, self._meta.block_tables
        num_tokens, num_rows = q.shape[0], meta.context_len.shape[0]
        if not num_tokens or not num_rows:
            return None
        splits, is_ring = self._splits(q), suits_ring(spec, pages)
        tile = tile_of(spec, pages, num_rows, has_long_rows=not splits)
        lanes = cdiv(meta.max_context_len, LANE) if splits else 1
        parts = _parts(q, lanes, tile.RANK) if splits else None
        rows = out, parts, meta.query_start, meta.context_len, tables, num_rows
        constants = {"C": tile, **dependent_launch(q.device)}
        blocks = cdiv(spec.num_heads, HEADS)
        if is_ring:
            is_one = meta.max_query_len == 1
            tiles = num_rows if is_one else num_tokens // tile.TOKENS + num_rows
            grid = tiles, blocks, num_shares(tiles * blocks, lanes, num_multiprocessors(q.device))
            warps = num_warps(pages.shape[4], merges=parts is None)
            places = layer * pages.shape[4], pages.shape[1] * pages.shape[4]
            latent_ring_kernel[grid](
                q, *descriptors(pages, tile.RANK), *rows, lanes, meta.log2_scale, places, tables.stride(0),
                IS_ONE=is_one, WARPS=warps, num_warps=warps, **constants,
            )  # fmt: skip
        else:
            sizes = meta.log2_scale, pages.stride(0), tables.stride(0)
            grid = num_tokens, blocks, lanes
            latent_kernel[grid](q, pages[:, layer], *rows, *sizes, **constants, **options(spec.dtype))
        return parts


@functools.cache
def num_shares(tiles: int, lanes: int, multiprocessors: int) -> int:
    """Return the programs that share the lanes of a tile of queries: each takes every so many-th lane.

    A program has a multiprocessor for itself, whose memory it fills, so the last of few waves should be full; what a
    program costs beside its keys is a fiftieth of those of a long row.
    """

    def cost(shares: int) -> float:
        waves = cdiv(tiles * shares, multiprocessors)
        return waves / shares + waves / 50

    return min(range(1, min(lanes, cdiv(2 * multiprocessors, tiles)) + 1), key=cost)


def lane_bytes(num_tokens: int, num_heads: int, longest: int, rank: int) -> int:
    """Return the bytes of what the lanes of short rows' tokens leave, by the longest context that there may be."""
    return num_tokens * (num_heads * cdiv(longest, LANE) * (rank + 2) + 1) * 4


def _parts(q: torch.Tensor, lanes: int, rank: int) -> LaneParts:
    shape, options = (*q.shape[:2], lanes), {"dtype": torch.float32, "device": q.device}
    numbers = torch.empty(shape, **options), torch.empty(shape, **options), torch.empty(*shape, rank, **options)
    return LaneParts(*numbers, torch.empty(q.shape[0], dtype=torch.int32, device=q.device))


def suits_ring(spec: AttentionSpec, pages: torch.Tensor) -> bool:
    """Return whether `latent_ring.py` computes it: 16 bits, tiles that fill rows of shared memory and fit there."""
    rank, rotated, block_size = spec.value_width, pages.shape[5] - spec.value_width, pages.shape[4]
    fits = rank in (64, 128, 256, 512) and rotated == 64 and block_size >= 8 and block_size & (block_size - 1) == 0
    return fits and has_wgmma(pages.device) and spec.dtype.itemsize == 2 and pages.is_contiguous()


def attention(
    spec: AttentionSpec, meta: AttentionMetadata, pages: torch.Tensor, slot_mapping: torch.Tensor, *, is_torch: bool
) -> TorchLatents:
    """Return the attention of a step over pages of latents."""
    kind = TorchLatents if is_torch or not launches(pages) else KernelLatents
    return kind(spec, meta, pages, slot_mapping)
