"""The page for Prometheus: the counts of all front ends and of the engine as metric families. Imports no grpc."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from photon_grpc import __version__
from photon_grpc.core.counts import Metric, Sums
from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load
from photon_grpc.observe import metrics


@dataclass(frozen=True, slots=True)
class Snapshot(Collector):
    """The service at one moment. `load` has the engine's counters, summed over its restarts."""

    load: Load
    counted: Sums
    is_ready: bool
    #: Facts of the newest engine; None until one was ready.
    facts: Facts | None = None
    model: str = ""
    num_frontends: int = 0
    num_engine_restarts: int = 0
    num_frontend_restarts: int = 0

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type, in the format that the header `accept` prefers."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is not a number
            encode, content_type = choose_encoder("")
        return encode(self), content_type

    def collect(self) -> Iterator[Family]:
        """Yield the families. Called by prometheus_client."""
        yield from self._service()
        yield from self._engine()
        for metric in metrics.COUNTED:
            yield _histogram(metric, self.counted) if metric.bounds else _counter(metric, self.counted)

    def _service(self) -> Iterator[Family]:
        if self.facts is not None:
            yield _build(self.facts, self.model)
        yield _gauge("ready", "1 where requests are served, else 0: as /readyz.", self.is_ready)
        yield _gauge("frontends", "Front-end processes that are alive.", self.num_frontends)
        restarts = CounterMetricFamily(
            "photon_restarts", "Processes that ended and were started again.", labels=["process"]
        )
        restarts.add_metric(["engine"], self.num_engine_restarts)
        restarts.add_metric(["frontend"], self.num_frontend_restarts)
        yield restarts

    def _engine(self) -> Iterator[Family]:
        load = self.load
        yield _gauge("num_requests_running", "Outputs being computed.", load.running)
        yield _gauge("num_requests_waiting", "Outputs that wait for a slot.", load.queued)
        yield _gauge("num_prompt_tokens_waiting", "Prompt tokens that wait for a slot.", load.queued_prompt_tokens)
        yield _gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks that requests own: 1 is 100 %.",
            load.owned_blocks / load.total_blocks if load.total_blocks else 0.0,
        )
        blocks = GaugeMetricFamily("photon_kv_cache_blocks", "KV blocks by state.", labels=["state"])
        for state in ("owned", "cached", "free", "limbo"):
            blocks.add_metric([state], getattr(load, f"{state}_blocks"))
        yield blocks
        yield _gauge("engine_step_seconds", "Duration of the last step.", load.step_s)
        yield _total("engine_steps", "Steps computed.", load.steps)
        yield _total("prompt_tokens", "Prompt tokens of requests that began, cached ones included.", load.prompt_tokens)
        yield _total("generation_tokens", "Tokens sent to front ends.", load.output_tokens)
        yield _total("overrun_tokens", "Tokens computed past the end of an output: dropped.", load.overrun_tokens)
        yield _total("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", load.prompt_tokens)
        yield _total("prefix_cache_hits", "Prompt tokens found there.", load.cached_prompt_tokens)
        yield _total(
            "prefix_cache_session_hits",
            "Prompt tokens found in the prefix cache by requests with a session_id.",
            load.session_cached_prompt_tokens,
        )
        yield _total("draft_tokens", "Tokens that were drafted.", load.draft_tokens)
        accepted = CounterMetricFamily(
            "photon_accepted_draft_tokens",
            "Accepted draft tokens, by position in a step.",
            labels=["position"],
        )
        for position, count in enumerate(load.accepted_at or (0,)):
            accepted.add_metric([str(position)], count)
        yield accepted
        yield _total("num_preemptions", "Outputs that lost their KV blocks to others.", load.preemptions)
        yield _total(
            "kv_saturated_values", "Numbers of keys and values beyond the range of the 8-bit KV cache.", load.saturated
        )
        yield from _experts(load)
        ended = CounterMetricFamily("photon_engine_outputs", "Outputs that ended in the engine.", labels=["end"])
        for end in ("finished", "failed", "cancelled"):
            ended.add_metric([end], getattr(load, end))
        yield ended


def _experts(load: Load) -> Iterator[Family]:
    yield _total("expert_layers", "Layers with experts that steps computed.", load.expert_layers)
    yield _total("experts_reached", "Experts that received tokens, summed over these layers.", load.experts_reached)
    yield _total("expert_tokens", "Tokens routed to experts: pairs of a token and an expert.", load.expert_tokens)
    yield _total("busiest_expert_tokens", "Such pairs of the busiest expert of each layer.", load.busiest_expert_tokens)


def _build(facts: Facts, model: str) -> Family:
    labels = {
        "version": __version__,
        "model_name": model,
        "device": facts.device,
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "kernels": facts.kernels,
        "numerics": facts.numerics.version,
    }
    family = GaugeMetricFamily("photon_build_info", "1; its labels describe what runs here.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _gauge(name: str, help: str, value: float) -> Family:
    return GaugeMetricFamily(f"photon_{name}", help, value)


def _total(name: str, help: str, value: float) -> Family:
    return CounterMetricFamily(f"photon_{name}", help, value)


def _counter(metric: Metric, counted: Sums) -> Family:
    family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
    for labels, (value,) in counted.of(metric).items():
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, counted: Sums) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = (*map(str, metric.bounds), "+Inf")
    for labels, (*counts, total) in counted.of(metric).items():
        family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)
    return family
