"""What a whole service tells of itself: load reports, its name, cached tokens, spans, the trace of its steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from photon_grpc.server.standard.load_report import OrcaLoadReport, OrcaLoadReportRequest
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.cli.test_trace import check_counts, events_of, tracks_of
from tests.observe.test_spans import TRACE_ID, Collector, attributes_of
from tests.server.test_records import TRACEPARENT
from tests.service.running import RunningService, modelless, wait_until
from tests.service.tiny import write_tiny_model

METRICS = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "steps.jsonl"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, collector: Collector, trace: Path) -> Iterator[RunningService]:
    """Yield a service, which the last test ends."""
    tiny = write_tiny_model(tmp_path_factory.mktemp("telemetry") / "tiny")
    model = ("--model", str(tiny), "--load-format", "dummy", "--num-blocks", "512", "--max-num-seqs", "4")
    telling = ("--replica-id", "pod-7", "--otlp-endpoint", collector.endpoint, "--step-trace", str(trace))
    with modelless(*model, *telling) as service:
        service.wait_ready()
        yield service


@pytest.fixture
def channel(service: RunningService) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.wait_ready()[0]) as channel:
        yield channel


def asked(method: str, max_tokens: int = 2) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="a prompt of some blocks " * 20, request_id=method)
    request.stop.max_tokens, request.stop.ignore_eos = max_tokens, True
    return request


def answer(stub: Any, method: str) -> tuple[Any, pb.Usage]:
    """Return the call and the usage in its last message."""
    metadata = (("traceparent", TRACEPARENT),)
    if method == "Generate":
        response, call = stub.Generate.with_call(asked(method), metadata=metadata, timeout=60)
        return call, response.usage
    if method == "StreamGenerate":
        call = stub.StreamGenerate(asked(method), metadata=metadata, timeout=60)
        return call, list(call)[-1].usage
    actions = [pb.MultiplexGenerateRequest(generate=asked(method))]
    call = stub.MultiplexGenerate(iter(actions), metadata=metadata, timeout=60)
    return call, list(call)[-1].items[-1].response.usage


def test_every_answer_names_its_replica_and_its_cached_tokens(channel: grpc.Channel) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    cached = []
    for method in ("Generate", "Generate", "StreamGenerate", "MultiplexGenerate"):
        call, usage = answer(stub, method)
        assert dict(call.initial_metadata())["x-photon-replica"] == "pod-7"
        assert usage.output_tokens == 2
        cached.append(usage.cached_prompt_tokens)
    first, *others = cached
    assert first == 0 and len(set(others)) == 1 and others[0] > 0


def test_load_reports_are_true_under_work_and_at_idle(channel: grpc.Channel) -> None:
    request = OrcaLoadReportRequest()
    request.report_interval.FromSeconds(1)
    method = channel.unary_stream(
        METRICS,
        request_serializer=OrcaLoadReportRequest.SerializeToString,
        response_deserializer=OrcaLoadReport.FromString,
    )
    reports = method(request, timeout=60)
    assert next(reports).application_utilization == 0
    calls = [
        inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(asked(f"long {number}", 2500), timeout=60)
        for number in range(3)
    ]
    for call in calls:
        next(call)
    while (report := next(reports)).application_utilization < 0.75:
        pass
    assert report.utilization["seats"] == 0.75 and report.named_metrics["num_requests_running"] == 3
    for call in calls:
        call.cancel()
    while (report := next(reports)).application_utilization > 0:
        pass
    assert report.named_metrics["num_requests_running"] == 0 and report.rps_fractional > 0


def test_at_the_end_all_spans_and_all_steps_have_been_written(
    service: RunningService, collector: Collector, trace: Path
) -> None:
    assert service.end() == 0
    roots = [span for span in collector.spans if span.trace_id == TRACE_ID and span.kind == span.SPAN_KIND_SERVER]
    assert [attributes_of(root)["gen_ai.response.id"] for root in roots] == [
        "Generate",
        "Generate",
        "StreamGenerate",
        "MultiplexGenerate",
    ]
    wait_until(lambda: json.loads(trace.read_text().splitlines()[-1])["blocks"]["owned"] == 0, "the last step")
    events = events_of(trace)
    check_counts(events, trace)
    tracks = tracks_of(events)
    for root in roots:
        attributes = attributes_of(root)
        queued, *_ = tracks[attributes["gen_ai.response.id"]]
        assert queued["args"]["prompt_tokens"] == attributes["gen_ai.usage.input_tokens"]
    assert {track[-1]["name"] for title, track in tracks.items() if title.startswith("long")} == {"ended: CANCELLED"}
