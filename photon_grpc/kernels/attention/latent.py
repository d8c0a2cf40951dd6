"""Attention over pages of latents: one vector a token that all heads share, which is both key and value.

    s[h, n] = scale · q[t, h] · c[n]          q [T, Hq, R + P], c [R + P]: R numbers of keys and values, P rotated ones
    out[t, h] = Σ_n softmax(s[h])[n] · c[n, :R]

Queries are absorbed: their plain part was multiplied by the weight that expands c to keys, and what expands c to values
comes behind. So prompts and single tokens are one formula, and a row has the same bits in any company: keys are added
in lanes of LANE positions, counted from position 0, each on its own, and lanes are merged in their order. Where rows
are short (decode) lanes are programs of their own and a second kernel merges them, else one program does both.

Shapes: q [T, Hq, R + P], pages [num_blocks, layers, 1, 1, block_size, R + P] -> out [T, Hq, R]. bf16, fp16, fp32.
Bytes moved: a token's context · (R + P) · itemsize for each 16 of its heads.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl

#: Keys that are added on their own; those of a step of a lane, and heads of a program.
LANE, STEP, HEADS = 512, 32, 16
#: Rows with at most so many queries have programs for their lanes.
SHORT = 8


def write_reference(latent: torch.Tensor, pages: torch.Tensor, layer: int, slot_mapping: torch.Tensor) -> None:
    """Write latent [T, R + P] to its slots in torch: changes pages."""
    block_size = pages.shape[4]
    block = slot_mapping // block_size
    pages[:, layer, 0, 0][block, slot_mapping - block * block_size] = latent


def reference(
    q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata, rank: int
) -> torch.Tensor:  # fmt: skip
    """Return out in torch; zeros for tokens that belong to no row."""
    out = q.new_zeros(*q.shape[:2], rank)
    starts, contexts = meta.query_start.tolist(), meta.context_len.tolist()
    for row, (start, stop) in enumerate(itertools.pairwise(starts)):
        context, count = contexts[row], stop - start
        if not count or not context:
            continue
        blocks = meta.block_tables[row, : cdiv(context, pages.shape[4])].long()
        latents = pages[blocks, layer, 0, 0].flatten(0, 1)[:context].float()
        scores = torch.einsum("thc,nc->htn", q[start:stop].float() * meta.scale, latents)
        position = torch.arange(context - count, context, device=q.device)
        hidden = torch.arange(context, device=q.device) > position[:, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        out[start:stop] = (weights @ latents[:, :rank]).transpose(0, 1).to(q.dtype)
    return out


class LatentSizes(NamedTuple):
    """The constants of a kernel: heads, numbers of a latent, rotated ones, and those of blocks."""

    NUM_HEADS: int
    RANK: int
    ROTATED: int
    RANK_PAD: int
    ROTATED_PAD: int
    BLOCK_SIZE: int


@jit
def write_latent_kernel(
    latent, pages, slot_mapping, block_stride, layer_offset, token_stride,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the latent of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    to = pages + slot // BLOCK_SIZE * block_stride + layer_offset + slot % BLOCK_SIZE * WIDTH
    tl.store(to + column, tl.load(latent + token * token_stride + column, mask=inside), mask=inside)


@jit
def merged(state, lane):
    """Return the state with a later lane in it: largest score, sum of powers, their sum times values."""
    most, total, acc = state
    lane_most, lane_total, lane_acc = lane
    largest = tl.maximum(most, lane_most)
    before, now = tl.exp2(most - largest), tl.exp2(lane_most - largest)
    total = tl.fma(lane_total, now, total * before)
    return largest, total, tl.fma(lane_acc, now[:, None] + tl.zeros_like(lane_acc), acc * before[:, None])


@jit
def lane_sums(
    q_plain, q_rotated, pages, table, begin, end, scale, block_stride,
    RANK: tl.constexpr, ROTATED: tl.constexpr, RANK_PAD: tl.constexpr, ROTATED_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return largest score [HEADS], sum of powers [HEADS] and that of values [HEADS, RANK_PAD] of a lane's keys."""
    most = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, RANK_PAD], tl.float32)
    plain, rotated = tl.arange(0, RANK_PAD), tl.arange(0, ROTATED_PAD)
    for first in range(begin, end, STEP):
        key = first + tl.arange(0, STEP)
        seen = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        at = pages + block * block_stride + key % BLOCK_SIZE * (RANK + ROTATED)
        c = tl.load(at[:, None] + plain[None, :], mask=seen[:, None] & (plain < RANK)[None, :], other=0.0)
        r = tl.load(at[:, None] + RANK + rotated[None, :], mask=seen[:, None] & (rotated < ROTATED)[None, :], other=0.0)
        s = tl.dot(q_plain, tl.trans(c), input_precision=PRECISION)
        s = tl.dot(q_rotated, tl.trans(r), s, input_precision=PRECISION) * scale
        s = tl.where(seen[None, :], s, -float("inf"))
        largest = tl.maximum(most, tl.max(s, 1))
        before, p = tl.exp2(most - largest), tl.exp2(s - largest[:, None])
        total = tl.fma(total, before, tl.sum(p, 1))
        acc = tl.dot(p.to(c.dtype), c, acc * before[:, None], input_precision=PRECISION)
        most = largest
    return most, total, acc


@jit
def latent_kernel(
    q, pages, out, parts, query_start, context_len, tables, num_rows, scale, block_stride, table_stride,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr,
    RANK_PAD: tl.constexpr, ROTATED_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS_PAD: tl.constexpr, LANE: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend for HEADS heads of one token per program; with `parts` for one lane of its keys.

    parts: most, total float32 [T, Hq, lanes] and acc [T, Hq, lanes, RANK], which `merge_kernel` reads; None: all lanes.
    """
    token, block = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, ROWS_PAD)
    ends = tl.load(query_start + 1 + number, mask=number < num_rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    if row < num_rows:
        stop = tl.load(query_start + row + 1)
        context = tl.load(context_len + row) - stop + token + 1
        head = block * HEADS + tl.arange(0, HEADS)
        plain, rotated = tl.arange(0, RANK_PAD), tl.arange(0, ROTATED_PAD)
        of_q = q + token.to(tl.int64) * (NUM_HEADS * (RANK + ROTATED)) + head[:, None] * (RANK + ROTATED)
        there = (head < NUM_HEADS)[:, None]
        q_plain = tl.load(of_q + plain[None, :], mask=there & (plain < RANK)[None, :], other=0.0)
        q_rotated = tl.load(of_q + RANK + rotated[None, :], mask=there & (rotated < ROTATED)[None, :], other=0.0)
        table = tables + row.to(tl.int64) * table_stride
        if parts is None:
            state = lane_sums(
                q_plain, q_rotated, pages, table, 0, tl.minimum(context, LANE), scale, block_stride,
                RANK, ROTATED, RANK_PAD, ROTATED_PAD, BLOCK_SIZE, STEP, HEADS, PRECISION,
            )  # fmt: skip
            most, total, acc = state
            for begin in range(LANE, context, LANE):
                lane = lane_sums(
                    q_plain, q_rotated, pages, table, begin, tl.minimum(context, begin + LANE), scale, block_stride,
                    RANK, ROTATED, RANK_PAD, ROTATED_PAD, BLOCK_SIZE, STEP, HEADS, PRECISION,
                )  # fmt: skip
                most, total, acc = merged((most, total, acc), lane)
            to = out + token.to(tl.int64) * (NUM_HEADS * RANK) + head[:, None] * RANK + plain[None, :]
            tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=there & (plain < RANK)[None, :])
        else:
            lane_number, num_lanes = tl.program_id(2), tl.num_programs(2)
            begin = lane_number * LANE
            if begin < context:
                most, total, acc = lane_sums(
                    q_plain, q_rotated, pages, table, begin, tl.minimum(context, begin + LANE), scale, block_stride,
                    RANK, ROTATED, RANK_PAD, ROTATED_PAD, BLOCK_SIZE, STEP, HEADS, PRECISION,
                )  # fmt: skip
                place = (token.to(tl.int64) * NUM_HEADS + head) * num_lanes + lane_number
                tl.store(parts[0] + place, most, mask=head < NUM_HEADS)
                tl.store(parts[1] + place, total, mask=head < NUM_HEADS)
                to = parts[2] + place[:, None] * RANK + plain[None, :]
                tl.store(to, acc, mask=there & (plain < RANK)[None, :])


@jit
def merge_kernel(
    parts, out, query_start, context_len, num_rows, num_lanes,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    ROWS_PAD: tl.constexpr, LANE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the lanes of HEADS heads of one token per program."""
    token = tl.program_id(0)
    number = tl.arange(0, ROWS_PAD)
    ends = tl.load(query_start + 1 + number, mask=number < num_rows, other=2147483647)
    row = tl.sum((ends <= token).to(tl.int32), 0)
    if row < num_rows:
        context = tl.load(context_len + row) - tl.load(query_start + row + 1) + token + 1
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        plain = tl.arange(0, RANK_PAD)
        inside = (head < NUM_HEADS)[:, None] & (plain < RANK)[None, :]
        place = (token.to(tl.int64) * NUM_HEADS + head) * num_lanes
        most = tl.load(parts[0] + place, mask=head < NUM_HEADS, other=0.0)
        total = tl.load(parts[1] + place, mask=head < NUM_HEADS, other=1.0)
        acc = tl.load(parts[2] + place[:, None] * RANK + plain[None, :], mask=inside, other=0.0)
        for lane in range(1, (context + LANE - 1) // LANE):
            of_lane = place + lane
            lane_most = tl.load(parts[0] + of_lane, mask=head < NUM_HEADS, other=0.0)
            lane_total = tl.load(parts[1] + of_lane, mask=head < NUM_HEADS, other=0.0)
            lane_acc = tl.load(parts[2] + of_lane[:, None] * RANK + plain[None, :], mask=inside, other=0.0)
            most, total, acc = merged((most, total, acc), (lane_most, lane_total, lane_acc))
        to = out + token.to(tl.int64) * (NUM_HEADS * RANK) + head[:, None] * RANK + plain[None, :]
        tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)


def config(spec: AttentionSpec, width: int, block_size: int, num_rows: int) -> dict[str, Any]:
    """Return the compile-time arguments of `latent_kernel`."""
    rank, rotated = spec.value_width, width - spec.value_width
    sizes = LatentSizes(
        spec.num_heads, rank, rotated, next_power_of_2(rank), max(16, next_power_of_2(rotated)), block_size
    )
    rows = {"ROWS_PAD": next_power_of_2(num_rows), "LANE": LANE, "STEP": STEP, "HEADS": HEADS, "PRECISION": "ieee"}
    return sizes._asdict() | rows | {"num_warps": 8, "num_stages": 2 if spec.dtype.itemsize == 2 else 1}


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
        found = reference(q, self._pages, layer, self._meta, self._spec.value_width)
        return found if out is None else out.copy_(found)


class KernelLatents(TorchLatents):
    """Attention over latents by kernels."""

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        """Write the latents k [T, 1, R + P]; v is a part of them."""
        pages, width = self._pages, k.shape[2]
        if k.shape[0]:
            write_latent_kernel[(k.shape[0],)](
                k, pages, self._slots, pages.stride(0), layer * pages.stride(1), k.stride(0),
                WIDTH=width, WIDTH_PAD=next_power_of_2(width), BLOCK_SIZE=pages.shape[4], num_warps=4,
            )  # fmt: skip

    def attend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        spec, meta, pages = self._spec, self._meta, self._pages
        num_rows, rank = meta.context_len.shape[0], spec.value_width
        if out is None:
            out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
        if not q.shape[0] or not num_rows:
            return out
        meta_of_kernel = config(spec, q.shape[2], pages.shape[4], num_rows)
        lanes, blocks = cdiv(meta.max_context_len, LANE), cdiv(spec.num_heads, HEADS)
        splits = lanes > 1 and meta.max_query_len <= SHORT
        parts = _parts(q, lanes, rank) if splits else None
        tables = meta.block_tables
        latent_kernel[(q.shape[0], blocks, lanes if splits else 1)](
            q, pages[:, layer], out, parts, meta.query_start, meta.context_len, tables, num_rows, meta.log2_scale,
            pages.stride(0), tables.stride(0), **meta_of_kernel,
        )  # fmt: skip
        if parts is not None:
            names = ("NUM_HEADS", "RANK", "RANK_PAD", "ROWS_PAD", "LANE", "HEADS")
            merge_kernel[(q.shape[0], blocks)](
                parts, out, meta.query_start, meta.context_len, num_rows, lanes,
                **{name: meta_of_kernel[name] for name in names}, num_warps=4,
            )  # fmt: skip
        return out


class LaneParts(NamedTuple):
    """The results of lanes: largest scores and sums of powers [T, Hq, lanes], sums of values [T, Hq, lanes, R]."""

    most: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor


def _parts(q: torch.Tensor, lanes: int, rank: int) -> LaneParts:
    shape, options = (*q.shape[:2], lanes), {"dtype": torch.float32, "device": q.device}
    return LaneParts(torch.empty(shape, **options), torch.empty(shape, **options), torch.empty(*shape, rank, **options))


def attention(
    spec: AttentionSpec, meta: AttentionMetadata, pages: torch.Tensor, slot_mapping: torch.Tensor, *, is_torch: bool
) -> TorchLatents:
    """Return the attention of a step over pages of latents."""
    kind = TorchLatents if is_torch or not launches(pages) else KernelLatents
    return kind(spec, meta, pages, slot_mapping)
