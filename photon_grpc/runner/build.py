"""Construction of a runner; the only place that knows which launch suits which device."""

from __future__ import annotations

from collections.abc import Callable

from photon_grpc.models.decoder import Decoder
from photon_grpc.models.short import one_layer_of_each_kind
from photon_grpc.runner.buckets import Buckets
from photon_grpc.runner.drafting import NO_SPECULATION, Speculation
from photon_grpc.runner.eager import EagerLaunch
from photon_grpc.runner.expert_counts import watching_experts
from photon_grpc.runner.graphs import Capture, CudaCapture, GraphLaunch
from photon_grpc.runner.intra_op_threads import SMALL_MODEL, SmallDraftsAlone, SmallStepsAlone
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.saturation import saturation_of
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Launch, Step


def eager_runner(
    decoder: Decoder,
    cache: KVCache,
    *,
    max_num_seqs: int,
    depth: int = 0,
    speculation: Speculation = NO_SPECULATION,
) -> ModelRunner:
    """Build a runner that launches every batch operation by operation."""
    table = _table(decoder, cache, max_num_seqs, speculation)
    step = Step(decoder, table, cache.pages, decoder.kernels, max_num_seqs)
    launch: Launch = EagerLaunch(step)
    drafter = speculation.drafter(table, decoder.kernels, cache, None)
    if decoder.device.type == "cpu" and decoder.num_parameters < SMALL_MODEL:
        launch = SmallStepsAlone(launch, decoder.num_parameters)
        drafter = SmallDraftsAlone(drafter, decoder.num_parameters)
    saturation = watching_experts(decoder.expert_tally, saturation_of(decoder.saturated))
    return ModelRunner(launch, table, cache, depth=depth, drafter=drafter, saturation=saturation)


def _table(decoder: Decoder, cache: KVCache, max_num_seqs: int, speculation: Speculation) -> SlotTable:
    table = SlotTable(
        max_num_seqs + 1,
        decoder.max_model_len,
        cache.plan,
        decoder.vocab_size,
        decoder.device,
        max_drafts=speculation.max_drafts,
    )
    table.write = decoder.kernels.admit
    return table


def graph_runner(
    decoder: Decoder,
    cache: KVCache,
    *,
    max_num_seqs: int,
    depth: int,
    progress: Callable[[int, int], None],
    capture: Capture | None = None,
    speculation: Speculation = NO_SPECULATION,
) -> ModelRunner:
    """Build a runner that replays batches that fit a bucket from CUDA graphs, which are captured here.

    `progress(done, total)` is called after each capture. `capture` makes the replays: CUDA graphs by default.
    """
    table = _table(decoder, cache, max_num_seqs, speculation)
    buckets = Buckets(max_num_seqs, speculation.max_drafts)
    step, short = (
        Step(each, table, cache.pages, decoder.kernels, max(max_num_seqs, *buckets.draws))
        for each in (decoder, one_layer_of_each_kind(decoder))
    )
    launch = GraphLaunch(step, EagerLaunch(step, buckets.rows), buckets, capture or CudaCapture(), short)
    launch.warm_up(progress)
    # With memory of its own: a step may replay a draft's forwards between a body and its tail.
    drafter = speculation.drafter(table, decoder.kernels, cache, capture or CudaCapture())
    saturation = watching_experts(decoder.expert_tally, saturation_of(decoder.saturated))
    return ModelRunner(launch, table, cache, depth=depth, drafter=drafter, saturation=saturation)
