"""Choice of the attention kernels: once a step, for all layers that share pages and an AttentionSpec.

    attention = kernels.attention(spec, meta, pages, slot_mapping)          # as a step begins
    attention.write(k, v, layer)                                            # in every layer
    attended = attention.attend(q, layer)

| rows of      | where                                                                            | kernels            |
|--------------|----------------------------------------------------------------------------------|--------------------|
| any          | pages of latents                                                                 | latent             |
| any          | no Triton, or tensors of a CPU                                                   | torch_attention    |
| one query    | 16 bits, head_dim 32, 64, 128 or 256, sm_80 up; pages of 16 or 8 bits            | gluon_decode       |
| one query    | else                                                                             | triton_decode      |
| several      | as for one, and no row of the step has more than 8                               | gluon_decode       |
| several      | Hopper, as for one, head_dim 64, 128 or 256, pages of 8, 16, 32 … tokens         | hopper_varlen      |
| several      | else                                                                             | triton_varlen      |

The two kernels of Gluon sum keys in one order (`key_order.py`), so the bits of a row depend on neither the rows beside
it nor its chunks. A batch of rows of one query and of many is two launches, the latter first. A step that verifies
drafts is one whose `max_query_len` is at most 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from photon_grpc.kernels.attention import (
    gluon_decode,
    hopper_ring,
    hopper_varlen,
    latent,
    online_softmax,
    torch_attention,
    triton_decode,
    triton_varlen,
    write_kv,
)
from photon_grpc.kernels.attention.decode_columns import programs_and_pairs
from photon_grpc.kernels.attention.gluon_decode import DependentChain
from photon_grpc.kernels.attention.metadata import AttentionMetadata
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.lang.gluon import can_fuse, has_wgmma
from photon_grpc.kernels.lang.jit import launches, num_multiprocessors
from photon_grpc.kernels.lang.page_scales import PAGE_DTYPE, of_layer

#: Steps of more rows of one query than this attend as mixed batches do.
MAX_DECODE_ROWS = 4096

#: Fills rows of out [T, Hq, D] from q [T, Hq, D] and one layer of the pages.
Launch = Callable[[torch.Tensor, torch.Tensor, int, AttentionMetadata, torch.Tensor], None]


class GroupAttention(Protocol):
    """One step's attention over the pages of one section of a KVGroup; `layer` is the layer's row there."""

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        """Write k, v [T, Hkv, D] (tokens may be strided) to the step's slots; every layer writes before it attends."""

    def attend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attend: q [T, Hq, D] (tokens may be strided) -> out [T, Hq, D] contiguous, new if not given.

        Tokens that belong to no row are left undefined.
        """


class TorchAttention:
    """Attention in torch, for any device, dtype and shape; the indices of keys are computed once for all layers."""

    def __init__(
        self, spec: AttentionSpec, meta: AttentionMetadata, pages: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        self._slots, self._scales = slot_mapping, meta.kv_scales
        self._places = write_kv.rows(slot_mapping, pages)
        self._layers = write_kv.layer_rows(pages)
        self._plan = torch_attention.GatherPlan(meta, pages, spec.dtype)

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        block_size, scales = self._plan.pages_shape[4], of_layer(self._scales, layer)
        given = write_kv.stored(k, v, self._slots, block_size, scales)
        write_kv.write_rows(given, self._layers[layer], self._places)

    def attend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        scales = of_layer(self._scales, layer)
        answer = torch_attention.attend_layer(q.to(self._plan.dtype), self._layers[layer], self._plan, scales)
        return answer.to(q.dtype) if out is None else out.copy_(answer)


@dataclass(frozen=True, slots=True, eq=False)
class KernelAttention:
    """The kernels of a step, in the order of their launches."""

    meta: AttentionMetadata
    pages: torch.Tensor
    slot_mapping: torch.Tensor
    launches: tuple[Launch, ...]

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        write_kv.launch(k, v, self.pages, layer, self.slot_mapping, of_layer(self.meta.kv_scales, layer))

    def attend(self, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for launch in self.launches:
            launch(q, self.pages, layer, self.meta, out)
        return out


def torch_backend(
    spec: AttentionSpec, meta: AttentionMetadata, pages: torch.Tensor, slot_mapping: torch.Tensor,
    chain: DependentChain | None = None,
) -> GroupAttention:  # fmt: skip
    """Return attention in torch on any device; the arguments are those of `dispatch`."""
    if spec.value_width:
        return latent.attention(spec, meta, pages, slot_mapping, is_torch=True)
    return TorchAttention(spec, meta, pages, slot_mapping)


def dispatch(
    spec: AttentionSpec, meta: AttentionMetadata, pages: torch.Tensor, slot_mapping: torch.Tensor,
    chain: DependentChain | None = None,
) -> GroupAttention:  # fmt: skip
    """Return the fastest kernels for a step.

    Args:
        spec: the facts of the layers.
        meta: the rows of the step.
        pages: [num_blocks, layers, 2, Hkv, block_size, D].
        slot_mapping: int64 [T], block · block_size + offset of every token.
        chain: the caller's, whose q is then contiguous; None if every kernel waits for the one before.
    """
    if spec.value_width:
        return latent.attention(spec, meta, pages, slot_mapping, is_torch=False)
    if not launches(pages):
        return TorchAttention(spec, meta, pages, slot_mapping)
    step = _StepFacts(spec, meta, pages, slot_mapping.shape[0])
    return KernelAttention(meta, pages, slot_mapping, tuple(_choose(step, chain)))


@dataclass(frozen=True, slots=True, eq=False)
class _StepFacts:
    """The facts of a step on which the choice of its kernels depends."""

    spec: AttentionSpec
    meta: AttentionMetadata
    pages: torch.Tensor
    num_tokens: int

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.spec.num_heads // self.pages.shape[3]

    @property
    def num_pairs(self) -> int:
        """Number of (row, key head) pairs."""
        return self.meta.context_len.shape[0] * self.pages.shape[3]

    @property
    def num_counters(self) -> int:
        """The most programs of the decode kernel, with rows of this step, that share no queries."""
        queries = gluon_decode.queries_of_a_row(self.meta, self.spec.num_heads, self.pages.shape[5])
        found = gluon_decode.shape(self.group, self.pages, queries=queries)
        return self.num_pairs * programs_and_pairs(found._replace(PAIRS=8))[0]

    @property
    def multiprocessors(self) -> int:
        return num_multiprocessors(self.pages.device)


def _choose(step: _StepFacts, chain: DependentChain | None) -> Iterator[Launch]:
    meta = step.meta
    if not step.num_pairs or not step.num_tokens:
        return
    is_short = _suits_gluon_decode(step) and gluon_decode.takes(meta, step.spec.num_heads, step.pages.shape[5])
    if chain is not None and is_short and step.num_counters <= MAX_DECODE_ROWS * step.pages.shape[3]:
        yield partial(gluon_decode.launch, chain=chain)
        return
    if meta.max_query_len > 1 and not is_short:
        yield _several_queries(step)
    if meta.min_query_len == 1 or is_short:
        yield _short_rows(step)


def _several_queries(step: _StepFacts) -> Launch:
    pages = step.pages
    if not _suits_hopper_varlen(step):
        return triton_varlen.launch
    found = gluon_decode.shape(step.group, pages, step.meta.window)
    if not torch.cuda.is_current_stream_capturing():
        # In a warm-up, before the first long prompt.
        hopper_varlen.preload(pages.device, step.spec.dtype, found)
    consumers = hopper_varlen.num_consumers(step.num_tokens * step.group, found, step.multiprocessors)
    return partial(hopper_varlen.launch, consumers=consumers)


def _short_rows(step: _StepFacts) -> Launch:
    if _suits_gluon_decode(step):
        # Zero again after every layer, as those of a chain are.
        counters = torch.zeros(step.num_counters, dtype=torch.int32, device=step.pages.device)
        return partial(gluon_decode.launch_short_rows, counters=counters)
    found = online_softmax.shape(step.spec.num_heads, step.pages, step.meta.window, step.spec.dtype)
    lanes = triton_decode.lanes_in_sight(step.meta.max_context_len, step.meta.window, found.LANE)
    splits = triton_decode.num_splits(step.num_pairs, lanes, step.multiprocessors)
    return partial(triton_decode.launch, splits=splits)


def _has_known_numbers(step: _StepFacts) -> bool:
    """Return whether queries have 16 bits, and pages the same type or, with heads of 64 and more, e4m3."""
    of_queries, of_pages = step.spec.dtype, step.pages.dtype
    if of_queries not in (torch.bfloat16, torch.float16):
        return False
    return of_pages == of_queries or (of_pages == PAGE_DTYPE and step.pages.shape[5] >= 64)


def _suits_gluon_decode(step: _StepFacts) -> bool:
    return (
        can_fuse(step.pages.device)
        and _has_known_numbers(step)
        and step.pages.shape[5] in gluon_decode.HEAD_DIMS
        and step.group <= gluon_decode.MAX_GROUP
    )


def _suits_hopper_varlen(step: _StepFacts) -> bool:
    meta, pages = step.meta, step.pages
    block_size, head_dim = pages.shape[4:]
    return (
        has_wgmma(pages.device)
        and _has_known_numbers(step)
        and head_dim in hopper_varlen.HEAD_DIMS
        and step.group <= hopper_varlen.CONSUMER_PAIRS
        and block_size >= hopper_ring.MIN_BLOCK_SIZE
        and block_size & (block_size - 1) == 0
        and pages.is_contiguous()
        and pages.numel() // head_dim < hopper_ring.MAX_CACHE_ROWS
        and meta.scale > 0
    )
