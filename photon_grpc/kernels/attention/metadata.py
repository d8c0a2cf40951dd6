"""What a step's attention needs to know about its rows, and how the torch reference gathers their pages.

Knows nothing of queries, keys or layers: one AttentionMetadata serves every layer of a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

# Queries of one row that the reference attends together. Smaller tiles skip more of the keys that causality hides,
# larger ones pay fewer calls: 32 was best or within 3 % of it for 4 and 32 heads, 128 to 512 queries, float32 and bf16.
QUERY_TILE = 32

# Decode rows are gathered together, key by key, while their keys and values, padded to the longest, stay near the size of
# a second-level cache. There the calls saved win (16 rows of 300 keys, 2 heads of 64, float32: 269 against 422 µs; one
# row of 100: 13 against 19), above it the padded copy costs more than they do (16 rows of 1,000 keys: 1,999 against
# 1,065 µs; with 8 heads 34.7 against 8.0 ms). Microseconds of one thread with AVX-512, pages of 16.
MAX_GATHER_BYTES = 8 << 20

LOG2_E = 1.0 / math.log(2.0)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """The rows of one mixed batch: how many queries each has and where its keys are.

    query_start: int32 [B + 1], row b's queries are query_start[b] … query_start[b + 1] - 1 of q [T, Hq, D].
    context_len: int32 [B], keys of the row, those of its own queries included; query j of `count` sits at position
        context_len - count + j and sees the keys up to there.
    block_tables: int32 [B, max_blocks], the pages of each row in order; entries behind its context are not read.
        A padding row has block 0 and context 1; its output means nothing.
    scale: factor of q · k, as a rule 1 / sqrt(D).
    max_query_len, max_context_len: upper bounds known to the host, so that nothing waits for the device. With
        max_query_len == 1 every row is one query: T == B.
    min_query_len: a lower bound of rows that have queries; above 1 nothing looks for decode rows.
    counts, contexts: the same numbers as host integers; the reference reads the device where they are missing.
    """

    query_start: torch.Tensor
    context_len: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    max_query_len: int
    max_context_len: int
    min_query_len: int = 1
    counts: Sequence[int] | None = None
    contexts: Sequence[int] | None = None
    _plans: dict[tuple[int, ...], GatherPlan] = field(default_factory=dict, init=False, repr=False)

    @property
    def log2_scale(self) -> float:
        """`scale` with log2(e) in it, for kernels whose softmax is made of powers of two."""
        return self.scale * LOG2_E

    def gather_plan(self, cache: torch.Tensor) -> GatherPlan:
        """The reference's way through the pages of `cache`, made once a step and cache, not once a layer."""
        key = (cache.data_ptr(), *cache.shape)
        if key not in self._plans:
            self._plans[key] = GatherPlan(self, cache)
        return self._plans[key]


@dataclass(frozen=True, eq=False)
class RowGather:
    """One row's pages: queries from `start`, and the indices of its page planes [2 · Hkv · pages]."""

    start: int
    count: int
    context: int
    planes: torch.Tensor


@dataclass(frozen=True, eq=False)
class DecodeGather:
    """Rows of one query each: their places in q, key indices [2 · B · Hkv · N], and the mask [B, 1, 1, N] of shorter ones."""

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


class GatherPlan:
    """Index tensors into `cache` [num_blocks, layers, 2, Hkv, block_size, D] seen from the first plane of a layer.

    A plane is the block_size · D elements of one (block, layer, K or V, head); `decode` is None where the rows with one
    query are better gathered one by one, and then they are among `rows`.
    """

    def __init__(self, meta: AttentionMetadata, cache: torch.Tensor) -> None:
        self.cache_shape = cache.shape
        self.dtype, self.device = cache.dtype, cache.device
        starts = meta.query_start.tolist()
        counts = meta.counts or [stop - start for start, stop in itertools.pairwise(starts)]
        contexts = meta.contexts or meta.context_len.tolist()
        live = [b for b, count in enumerate(counts) if count and contexts[b]]
        decode = [b for b in live if counts[b] == 1]
        self.decode = None
        if self._gathers_together([contexts[b] for b in decode]):
            self.decode = self._decode_gather(decode, starts, contexts, meta.block_tables)
            live = [b for b in live if counts[b] != 1]
        self.rows = [
            RowGather(starts[b], counts[b], contexts[b], self._planes(meta.block_tables[b], contexts[b])) for b in live
        ]
        self.covers_all = self.decode is not None and not live and len(decode) == starts[-1]
        self._mask: dict[int, torch.Tensor] = {}

    def _gathers_together(self, contexts: list[int]) -> bool:
        if not contexts or self.device.type != "cpu":
            return False
        _, _, _, kv_heads, _, head_dim = self.cache_shape
        padded = len(contexts) * max(contexts)
        num_bytes = 2 * padded * kv_heads * head_dim * self.dtype.itemsize
        return num_bytes <= MAX_GATHER_BYTES and padded <= 2 * sum(contexts)

    def _planes(self, table: torch.Tensor, context: int) -> torch.Tensor:
        _, layers, _, kv_heads, block_size, _ = self.cache_shape
        blocks = table[: -(-context // block_size)].long() * (layers * 2 * kv_heads)
        return (blocks + torch.arange(2 * kv_heads, device=self.device).unsqueeze(1)).view(-1)

    def _decode_gather(
        self, rows: list[int], starts: list[int], contexts: Sequence[int], tables: torch.Tensor
    ) -> DecodeGather:
        _, layers, _, kv_heads, block_size, _ = self.cache_shape
        context = torch.tensor([contexts[b] for b in rows]).unsqueeze(1)
        position = torch.arange(int(context.max())).expand(len(rows), -1)
        # Behind its context a row reads its own last key again: masked, but never another row's (perhaps NaN) bytes.
        clamped = torch.minimum(position, context - 1)
        block = tables[torch.tensor(rows)].long().gather(1, clamped // block_size)
        planes = (block * (layers * 2 * kv_heads)).view(1, len(rows), 1, -1)
        planes = planes + torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)
        keys = planes * block_size + (clamped % block_size).unsqueeze(1)
        behind = position >= context
        mask = torch.zeros(behind.shape, dtype=self.dtype).masked_fill_(behind, -torch.inf).view(len(rows), 1, 1, -1)
        queries = torch.tensor([starts[b] for b in rows])
        return DecodeGather(queries, keys.view(-1), mask if behind.any() else None)

    def causal_mask(self, count: int, context: int, group: int) -> torch.Tensor:
        """[count · group, context]: the last `count` of `context` positions, `group` equal rows each, see no later key."""
        mask = self._mask.get(group)
        if mask is None or mask.shape[1] < context:
            longest = max(row.context for row in self.rows)
            key = torch.arange(longest, device=self.device)
            query = torch.arange(longest - QUERY_TILE, longest, device=self.device).repeat_interleave(group)
            mask = torch.zeros((query.shape[0], longest), dtype=self.dtype, device=self.device)
            self._mask[group] = mask.masked_fill_(key > query.unsqueeze(1), -torch.inf)
        # Aligned at the last query and the last key, every smaller mask is a corner of the largest.
        return mask[mask.shape[0] - count * group :, mask.shape[1] - context :]
