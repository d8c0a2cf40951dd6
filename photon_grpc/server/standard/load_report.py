"""ORCA load reports (xds.data.orca.v3), in the trailers of every call and out of band.

gRPC's weighted_round_robin and other balancers choose a replica by them.
https://github.com/grpc/proposal/blob/master/A51-custom-backend-metrics.md
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, NamedTuple

import grpc

from photon_grpc.access.places import Places, silent_call
from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load
from photon_grpc.errors import Unavailable
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server.calls.call import current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.wire import descriptors
from photon_grpc.server.wire.writer import StreamWriter

OrcaLoadReport = descriptors.message_class("xds.data.orca.v3.OrcaLoadReport")
OrcaLoadReportRequest = descriptors.message_class("xds.service.orca.v3.OrcaLoadReportRequest")
TRAILER = "endpoint-load-metrics-bin"

#: Rates are averages over _NUM_SAMPLES intervals.
_SAMPLE_INTERVAL_S = 1.0
_NUM_SAMPLES = 5
#: Interval of reports on a stream; gRPC's clients request 10 s.
LEAST_INTERVAL_S = 1.0
DEFAULT_INTERVAL_S = 10.0
MAX_STREAMS = 256
_RETRY_AFTER_S = 30.0
#: gRPC's clients reopen an evicted stream at once.
_LEAST_IDLE_S = 10.0
#: A replica whose queue takes this long to drain is full.
_FULL_QUEUE_S = 1.0


class _Sample(NamedTuple):
    time_s: float
    #: Outputs since the engine's start.
    ended: int
    failed: int


class LoadReports:
    """The reports of one replica: the engine's Load over all front ends."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._samples: deque[_Sample] = deque(maxlen=_NUM_SAMPLES + 1)
        #: The Load in the newest trailers; None if they must be made again.
        self._reported: Load | None = None
        self._trailers: tuple[tuple[str, bytes], ...] = ()

    def report(self) -> Any:
        """Return the current report; without an engine an empty one, which clients ignore."""
        try:
            facts = self._frontend.facts
        except Unavailable:
            return OrcaLoadReport()
        load = self._frontend.load
        shares = utilizations(load, facts)
        ended_per_s, failed_per_s = self._rates(_sample(load))
        report = OrcaLoadReport(
            application_utilization=max(shares.values()), rps_fractional=ended_per_s, eps=failed_per_s
        )
        for name, share in shares.items():
            report.utilization[name] = min(share, 1.0)
        named = report.named_metrics  # assigned one by one, which is twice as fast as passing a dict
        named["kv_cache_usage_perc"] = shares["kv"]
        named["num_requests_running"] = load.running
        named["num_requests_waiting"] = load.queued
        named["output_tokens_per_s"] = load.output_tokens_per_s
        return report

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """Return the report as trailing metadata, made once for all calls that end with the same step."""
        load = self._frontend.load
        if load is not self._reported:
            self._trailers = ((TRAILER, self.report().SerializeToString()),)
            self._reported = load
        return self._trailers

    async def watch(self) -> None:
        """Take samples for the rates as long as the server runs, whether or not calls end."""
        while True:
            self._samples.append(_sample(self._frontend.load))
            self._reported = None
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    def _rates(self, now: _Sample) -> tuple[float, float]:
        """Return the outputs that ended and that failed per second. A restarted engine counts from 0."""
        then = self._samples[0] if self._samples else now
        elapsed_s = max(now.time_s - then.time_s, _SAMPLE_INTERVAL_S)
        return max(now.ended - then.ended, 0) / elapsed_s, max(now.failed - then.failed, 0) / elapsed_s


def utilizations(load: Load, facts: Facts) -> dict[str, float]:
    """Return the shares of KV blocks and slots in use, and the time to drain the queue in seconds. 1 means full."""
    return {
        "kv": load.owned_blocks / load.total_blocks if load.total_blocks else 0.0,
        "seats": load.running / facts.max_num_seqs,
        "queue": load.retry_after_s / _FULL_QUEUE_S if load.queued else 0.0,
    }


class OpenRcaService:
    """xds.service.orca.v3.OpenRcaService: reports on their own stream, for connections with few or long calls."""

    def __init__(self, reports: LoadReports, writer: StreamWriter) -> None:
        self._reports = reports
        self._writer = writer
        self._is_over = asyncio.Event()
        self.places = Places(
            "streams of load reports", MAX_STREAMS, least_idle_s=_LEAST_IDLE_S, retry_after_s=_RETRY_AFTER_S
        )

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_stream_rpc_method_handler(
            self.StreamCoreMetrics, OrcaLoadReportRequest.FromString, OrcaLoadReport.SerializeToString
        )
        return grpc.method_handlers_generic_handler(descriptors.LOAD_REPORTS, {"StreamCoreMetrics": method})

    def close(self) -> None:
        """End every stream; an open one would delay the server's stop."""
        self._is_over.set()

    async def StreamCoreMetrics(self, request: Any, context: Context) -> None:
        """Send a report at once, then one per interval. Raise QueueFull, IdleStreamEvicted."""
        with silent_call(self.places, current().caller):
            await current().send_initial_metadata(context)
            await self._send_reports(_interval_s(request), context)

    async def _send_reports(self, interval_s: float, context: Context) -> None:
        while not self._is_over.is_set():
            await self._writer.write(context, self._reports.report())
            try:
                await asyncio.wait_for(self._is_over.wait(), interval_s)
            except TimeoutError:
                continue


def _sample(load: Load) -> _Sample:
    return _Sample(time.monotonic(), load.finished + load.failed + load.cancelled, load.failed)


def _interval_s(request: Any) -> float:
    interval = request.report_interval
    if not request.HasField("report_interval"):
        return DEFAULT_INTERVAL_S
    return float(max(interval.seconds + interval.nanos / 1e9, LEAST_INTERVAL_S))
