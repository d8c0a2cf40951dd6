"""Puts a runner together. The only place that knows which step goes with which device."""

from __future__ import annotations

from collections.abc import Callable

from photon_grpc.kernels import Kernels
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner.graphs import Capture, CudaCapture, GraphStep, PaddedStep, decode_buckets, mixed_buckets
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.sampler import Sampler
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import EagerStep


def eager_runner(
    decoder: Decoder, cache: KVCache, kernels: Kernels, *, max_num_seqs: int, depth: int = 0
) -> ModelRunner:
    """Every batch launched operation by operation."""
    table = SlotTable(max_num_seqs + 1, decoder.max_model_len, cache.plan, decoder.vocab_size, decoder.device)
    step = EagerStep(decoder, table, cache.pages, Sampler(decoder, table, kernels))
    return ModelRunner(step, table, cache, depth=depth)


def graph_runner(
    decoder: Decoder,
    cache: KVCache,
    kernels: Kernels,
    *,
    max_num_seqs: int,
    depth: int,
    progress: Callable[[int, int], None],
    capture: Capture | None = None,
) -> ModelRunner:
    """Batches that fit a bucket are replayed from CUDA graphs, which are captured here; `progress(done, total)`.

    `capture`: what makes the replays; CUDA graphs unless it is given.
    """
    table = SlotTable(max_num_seqs + 1, decoder.max_model_len, cache.plan, decoder.vocab_size, decoder.device)
    tail = Sampler(decoder, table, kernels)
    padded = PaddedStep(decoder, table, cache.pages, tail, kernels, max_rows=max(mixed_buckets(max_num_seqs)))
    eager = EagerStep(decoder, table, cache.pages, tail, row_buckets=decode_buckets(max_num_seqs))
    step = GraphStep(padded, eager, table, tail, capture or CudaCapture(), max_num_seqs)
    step.warm_up(progress)
    return ModelRunner(step, table, cache, depth=depth)
