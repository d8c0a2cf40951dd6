"""ORCA load reports (xds.data.orca.v3), by which gRPC's weighted_round_robin and others choose a replica: in the
trailers of every call, and out of band.

https://github.com/grpc/proposal/blob/master/A51-custom-backend-metrics.md
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, NamedTuple

import grpc

from photon_grpc.core.frames import Facts
from photon_grpc.core.stats import Load
from photon_grpc.errors import Unavailable
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server.calls.call import current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.calls.places import Places, silent_call
from photon_grpc.server.wire import descriptors
from photon_grpc.server.wire.writer import StreamWriter

OrcaLoadReport = descriptors.message_class("xds.data.orca.v3.OrcaLoadReport")
OrcaLoadReportRequest = descriptors.message_class("xds.service.orca.v3.OrcaLoadReportRequest")
TRAILER = "endpoint-load-metrics-bin"

#: Rates are averages over so many samples.
_SAMPLE_INTERVAL_S = 1.0
_NUM_SAMPLES = 5
#: Between two reports on a stream; gRPC's clients ask for 10 s.
LEAST_INTERVAL_S = 1.0
DEFAULT_INTERVAL_S = 10.0
MAX_STREAMS = 256
_RETRY_AFTER_S = 30.0
#: gRPC's clients open a stream again at once.
_LEAST_IDLE_S = 10.0
#: A queue that takes so long to drain is a full replica.
_FULL_QUEUE_S = 1.0


class _Sample(NamedTuple):
    time_s: float
    #: Outputs since start.
    ended: int
    failed: int


class LoadReports:
    """Makes the reports of one replica: the engine's Load, over all front ends."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._samples: deque[_Sample] = deque(maxlen=_NUM_SAMPLES + 1)
        #: The Load of the newest trailers; None where they are to be made anew.
        self._told: Load | None = None
        self._trailers: tuple[tuple[str, bytes], ...] = ()

    def report(self) -> Any:
        """Of this moment; an empty one, which clients ignore, where there is no engine."""
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
        named = report.named_metrics  # by assignment: protobuf takes a dict in twice as slowly
        named["kv_cache_usage_perc"] = shares["kv"]
        named["num_requests_running"] = load.running
        named["num_requests_waiting"] = load.queued
        named["output_tokens_per_s"] = load.output_tokens_per_s
        return report

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """Return the report as trailing metadata; made once for all calls that end with one step."""
        load = self._frontend.load
        if load is not self._told:
            self._trailers = ((TRAILER, self.report().SerializeToString()),)
            self._told = load
        return self._trailers

    async def watch(self) -> None:
        """Run as long as the server does: rates need samples, whether or not calls end."""
        while True:
            self._samples.append(_sample(self._frontend.load))
            self._told = None
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    def _rates(self, now: _Sample) -> tuple[float, float]:
        """Return outputs that ended and that failed, per second. An engine that was restarted counts from 0."""
        then = self._samples[0] if self._samples else now
        elapsed_s = max(now.time_s - then.time_s, _SAMPLE_INTERVAL_S)
        return max(now.ended - then.ended, 0) / elapsed_s, max(now.failed - then.failed, 0) / elapsed_s


def utilizations(load: Load, facts: Facts) -> dict[str, float]:
    """Return the shares of KV blocks and seats in use, and the time in seconds in which the queue drains: 1 is full."""
    return {
        "kv": load.owned_blocks / load.total_blocks if load.total_blocks else 0.0,
        "seats": load.running / facts.max_num_seqs,
        "queue": load.retry_after_s / _FULL_QUEUE_S if load.queued else 0.0,
    }


class OpenRcaService:
    """xds.service.orca.v3.OpenRcaService: the reports on a stream of their own, for connections that carry few or long
    calls."""

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
        """End every stream; an open one would hold up the server's stop."""
        self._is_over.set()

    async def StreamCoreMetrics(self, request: Any, context: Context) -> None:
        """A report at once, then one every interval. Raise QueueFull, IdleStreamEvicted."""
        with silent_call(self.places, current().caller):
            await current().send_initial_metadata(context)
            await self._tell(_interval_s(request), context)

    async def _tell(self, interval_s: float, context: Context) -> None:
        while not self._is_over.is_set():
            await self._writer.write(context, self._reports.report())
            try:
                await asyncio.wait_for(self._is_over.wait(), interval_s)
            except TimeoutError:
                continue


def _sample(load: Load) -> _Sample:
    return _Sample(time.monotonic(), load.finished + load.failed + load.cancelled, load.failed)


def _interval_s(request: Any) -> float:
    wanted = request.report_interval
    if not request.HasField("report_interval"):
        return DEFAULT_INTERVAL_S
    return float(max(wanted.seconds + wanted.nanos / 1e9, LEAST_INTERVAL_S))
