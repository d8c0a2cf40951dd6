"""Attention over a paged KV cache in torch: the reference of every kernel, and the implementation for a CPU.

    out[t] = softmax(scale · q[t] · K[first : p + 1]ᵀ) · V[first : p + 1],  p the position of token t in its row,
    first = 0, or max(0, p - window + 1) where there is a window

Grouped queries: query head h reads key head h // (Hq / Hkv). Pages are gathered row by row, those of short decode rows
together; pages wholly before the window are not read.

Shapes: q [T, Hq, D] (tokens may be strided), pages [num_blocks, layers, 2, Hkv, block_size, D], AttentionMetadata of
the rows -> out [T, Hq, D], undefined for tokens that belong to no row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from photon_grpc.kernels.attention import write_kv
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.lang.page_scales import PageScales, dequantized, of_layer

# Queries of one row that are attended together. Smaller tiles skip more of the keys that causality hides,
# larger ones pay fewer calls: 32 was best or within 3 % of it for 4 and 32 heads, 128 to 512 queries, float32 and bf16.
QUERY_TILE = 32

# Decode rows are gathered together, key by key, while their keys and values, padded to the longest, stay near the size
# of a second-level cache. There the calls saved win (16 rows of 300 keys, 2 heads of 64, float32: 269 against 422 µs;
# one row of 100: 13 against 19), above it the padded copy costs more than they do (16 rows of 1,000 keys: 1,999 against
# 1,065 µs; with 8 heads 34.7 against 8.0 ms). Microseconds of one thread with AVX-512, pages of 16.
MAX_GATHER_BYTES = 8 << 20


@dataclass(frozen=True, eq=False, slots=True)
class RowGather:
    """The pages of one row.

    Queries begin at `start`, keys at position `first_key`; planes [2 · Hkv · pages] has the indices of the page planes.
    """

    start: int
    count: int
    context: int
    first_key: int
    planes: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class DecodeGather:
    """Rows of one query each: places in q, key indices [2 · B · Hkv · N], mask [B, 1, 1, N] of shorter rows."""

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


class GatherPlan:
    """Index tensors into `pages` seen from the first page plane of a layer: one plan serves every layer of a step.

    A page plane is the block_size · D elements of one (block, layer, K or V, head). `decode` is None where the rows
    with one query are better gathered one by one; then they are among `rows`.
    """

    def __init__(self, meta: AttentionMetadata, pages: torch.Tensor, dtype: torch.dtype) -> None:
        self.pages_shape = pages.shape
        self.scale = meta.scale
        self.dtype, self.device = dtype, pages.device
        self.window = meta.window
        starts = meta.query_start.tolist()
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        contexts = meta.context_len.tolist()
        live = [b for b, count in enumerate(counts) if count and contexts[b]]
        decode = [b for b in live if counts[b] == 1]
        self.decode = None
        if self._gathers_together([contexts[b] - self._first_key(contexts[b], 1) for b in decode]):
            self.decode = self._decode_gather(decode, starts, contexts, meta.block_tables)
            live = [b for b in live if counts[b] != 1]
        self.rows = [self._row_gather(starts[b], counts[b], contexts[b], meta.block_tables[b]) for b in live]
        self.covers_all = self.decode is not None and not live and len(decode) == starts[-1]
        self._mask: dict[int, torch.Tensor] = {}

    def _first_key(self, context: int, count: int) -> int:
        """Return the oldest position that the last `count` of `context` tokens see."""
        return max(0, context - count - self.window + 1) if self.window else 0

    def _gathers_together(self, num_keys: list[int]) -> bool:
        if not num_keys or self.device.type != "cpu":
            return False
        _, _, _, kv_heads, _, head_dim = self.pages_shape
        padded = len(num_keys) * max(num_keys)
        num_bytes = 2 * padded * kv_heads * head_dim * self.dtype.itemsize
        return num_bytes <= MAX_GATHER_BYTES and padded <= 2 * sum(num_keys)

    def _row_gather(self, start: int, count: int, context: int, table: torch.Tensor) -> RowGather:
        _, layers, _, kv_heads, block_size, _ = self.pages_shape
        first_page = self._first_key(context, count) // block_size
        blocks = table[first_page : -(-context // block_size)].long() * (layers * 2 * kv_heads)
        places = (blocks + torch.arange(2 * kv_heads, device=self.device).unsqueeze(1)).view(-1)
        return RowGather(start, count, context, first_page * block_size, places)

    def _decode_gather(
        self, rows: list[int], starts: list[int], contexts: Sequence[int], tables: torch.Tensor
    ) -> DecodeGather:
        _, layers, _, kv_heads, block_size, _ = self.pages_shape
        begins = [self._first_key(contexts[b], 1) for b in rows]
        ends = [contexts[b] for b in rows]
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        end = torch.tensor(ends)[:, None]
        position = torch.arange(max(lengths))
        if any(begins):
            position = torch.tensor(begins)[:, None] + position
        # Past its context a row reads its own last key again: masked, but never another row's (perhaps NaN) bytes.
        clamped = torch.minimum(position, end - 1)
        if len(rows) != len(tables):
            tables = tables[torch.tensor(rows)]
        block = tables.gather(1, clamped // block_size)
        key = torch.add(clamped % block_size, block, alpha=layers * 2 * kv_heads * block_size)
        keys = key.view(1, len(rows), 1, -1) + _head_offsets(kv_heads, block_size)
        mask = None
        if min(lengths) != max(lengths):
            hidden = (position >= end).view(len(rows), 1, 1, -1)
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
        return DecodeGather(torch.tensor([starts[b] for b in rows]), keys.view(-1), mask)

    def causal_mask(self, count: int, num_keys: int, group: int) -> torch.Tensor:
        """Return the mask [count · group, num_keys] of the last `count` positions, `group` equal rows each.

        A position sees no later key and none before the window.
        """
        mask = self._mask.get(group)
        if mask is None or mask.shape[1] < num_keys:
            longest = max(row.context for row in self.rows)
            if self.window:
                longest = min(longest, self.window + QUERY_TILE - 1)
            key = torch.arange(longest, device=self.device)
            query = (
                torch.arange(longest - QUERY_TILE, longest, device=self.device).repeat_interleave(group).unsqueeze(1)
            )
            hidden = key > query
            if self.window:
                hidden |= key <= query - self.window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            self._mask[group] = mask.masked_fill_(hidden, -torch.inf)
        # Aligned at the last query and the last key, every smaller mask is a corner of the largest.
        return mask[mask.shape[0] - count * group :, mask.shape[1] - num_keys :]

    def tile_keys(self, row: RowGather, first: int, count: int) -> tuple[int, int]:
        """Return (begin, end) among the row's gathered keys that queries first … first + count - 1 see."""
        seen = row.context - row.count + first + count
        return self._first_key(seen, count) - row.first_key, seen - row.first_key


@functools.cache
def _head_offsets(kv_heads: int, block_size: int) -> torch.Tensor:
    """Return int64 [2, 1, Hkv, 1]: rows of head_dim from a key of head 0 to that of each head, and to its value."""
    return torch.arange(0, 2 * kv_heads * block_size, block_size).view(2, 1, kv_heads, 1)


def attend(q: torch.Tensor, pages: torch.Tensor, layer: int, meta: AttentionMetadata) -> torch.Tensor:
    """Return out [T, Hq, D]."""
    plan, scales = GatherPlan(meta, pages, q.dtype), of_layer(meta.kv_scales, layer)
    return attend_layer(q, write_kv.layer_rows(pages)[layer], plan, scales)


def attend_layer(
    q: torch.Tensor, layer: torch.Tensor, plan: GatherPlan, scales: PageScales | None = None
) -> torch.Tensor:
    """Return out [T, Hq, D] over one of the `write_kv.layer_rows` of the plan's pages; q has the plan's dtype.

    `scales`: of pages of 8 bits.
    """
    decode = plan.decode
    # A padded batch has queries that belong to no row.
    if plan.covers_all and decode is not None and decode.queries.shape[0] == q.shape[0]:
        return _attend_together(q, layer, plan, decode, scales)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if decode is not None:
        out[decode.queries] = _attend_together(q[decode.queries], layer, plan, decode, scales)
    kv_heads, block_size, head_dim = plan.pages_shape[3:]
    planes = layer.view(-1, block_size * head_dim)
    for row in plan.rows:
        k, v = _numbers(planes.index_select(0, row.planes).view(2, 1, kv_heads, -1, head_dim), scales, q.dtype)
        _attend_row(q, out, (k, v), plan, row)
    return out


def _numbers(gathered: torch.Tensor, scales: PageScales | None, dtype: torch.dtype) -> torch.Tensor:
    """Return gathered keys and values [2, B, Hkv, N, D] in the dtype of the queries."""
    return gathered.to(dtype) if scales is None else dequantized(gathered, scales.scales[:, None, :, None, None], dtype)


def _attend_together(
    q: torch.Tensor, layer: torch.Tensor, plan: GatherPlan, gather: DecodeGather, scales: PageScales | None
) -> torch.Tensor:
    """Attend for rows of one query, q [B, Hq, D], over one gather of all keys, masked to each row's length."""
    kv_heads, _, head_dim = plan.pages_shape[3:]
    k, v = _numbers(layer.index_select(0, gather.keys).view(2, q.shape[0], kv_heads, -1, head_dim), scales, q.dtype)
    grouped = q.reshape(q.shape[0], kv_heads, -1, head_dim)
    return _attention(grouped, k, v, gather.mask, plan.scale).reshape(q.shape)


def _attend_row(
    q: torch.Tensor, out: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: GatherPlan, row: RowGather
) -> None:
    """Attend for one row over its gathered keys and values [1, Hkv, N, D].

    QUERY_TILE queries are computed at a time, each tile against the keys it sees.

    The group is folded into the query rows (never `enable_gqa`, which is many times slower on a CPU).
    """
    k, v = kv
    _, kv_heads, _, head_dim = k.shape
    group = q.shape[1] // kv_heads
    if row.count == 1:
        begin, end = plan.tile_keys(row, 0, 1)
        grouped = q[row.start].reshape(1, kv_heads, group, head_dim)
        out[row.start] = _attention(grouped, k[:, :, begin:end], v[:, :, begin:end], None, plan.scale).view(
            -1, head_dim
        )
        return
    for first in range(0, row.count, QUERY_TILE):
        count = min(QUERY_TILE, row.count - first)
        begin, end = plan.tile_keys(row, first, count)
        tile = slice(row.start + first, row.start + first + count)
        folded = q[tile].unflatten(1, (kv_heads, group)).transpose(0, 1).reshape(1, kv_heads, count * group, head_dim)
        mask = plan.causal_mask(count, end - begin, group) if count > 1 else None
        answer = _attention(folded, k[:, :, begin:end], v[:, :, begin:end], mask, plan.scale)
        unfolded = answer.view(kv_heads, count, group, head_dim).transpose(0, 1)
        out[tile].view(count, kv_heads, group, head_dim).copy_(unfolded)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return softmax(scale · q kᵀ + mask) v, computed in float32 at least; q [B, Hkv, M, D], k and v [B, Hkv, N, D]."""
    if not q.is_cuda:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # The fused backends on CUDA want masks aligned to 16 bytes (cuDNN's faults where they are not); corners are not.
    scores = (q.float() * scale) @ k.float().transpose(-1, -2)
    if mask is not None:
        scores += mask
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
