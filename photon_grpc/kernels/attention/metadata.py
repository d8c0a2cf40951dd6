"""The rows of a batch, as a step's attention needs them.

Knows nothing of queries, keys or layers: one AttentionMetadata serves every layer of a KVGroup that
attends alike in a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from photon_grpc.kernels.lang.page_scales import PageScales

LOG2_E = 1.0 / math.log(2.0)


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """The rows of one mixed batch: how many queries each has and where its keys are.

    query_start: int32 [B + 1], row b's queries are query_start[b] … query_start[b + 1] - 1 of q [T, Hq, D].
    context_len: int32 [B], keys of the row, those of its own queries included; query j of `count` sits at position
        context_len - count + j and sees the keys up to there.
    block_tables: int32 [B, max_blocks], the pages of each row in order; entries after its context are not read, nor
        entries whose page lies wholly before the window of its oldest query. A padding row has block 0 and context 1;
        its output has no meaning.
    scale: factor of q · k, as a rule 1 / sqrt(D).
    max_query_len, max_context_len: upper bounds known to the host, so that nothing waits for the device. With
        max_query_len == 1 every row has one query: T == B.
    min_query_len: a lower bound for rows that have queries; above 1 no kernel looks for decode rows.
    kv_scales: the constants of pages of 8 bits, of every layer in them; None: pages have the dtype of the queries.
    window: tokens a query looks back, itself included: it sees the keys at positions p - window + 1 … p. 0: all of
        them.
    """

    query_start: torch.Tensor
    context_len: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    max_query_len: int
    max_context_len: int
    min_query_len: int = 1
    window: int = 0
    kv_scales: tuple[PageScales, ...] | None = None

    @property
    def log2_scale(self) -> float:
        """The `scale` with log2(e) in it, for kernels whose softmax is made of powers of two."""
        return self.scale * LOG2_E
