"""Spans as a collector receives them over its socket."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from photon_grpc.compose.tracing import tracing
from photon_grpc.config.resolve import resolve
from photon_grpc.core.ask import Origin
from photon_grpc.core.frames import Failed
from photon_grpc.core.generation import Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import ConfigError, NumericFailure
from photon_grpc.frontend.record import RequestRecord
from photon_grpc.observe import spans as spans_module
from photon_grpc.observe.spans import RequestSpans
from photon_grpc.v1 import inference_pb2_grpc
from tests.frontend.fake_engine import done
from tests.server.test_records import SECRET, TOKEN, TRACEPARENT, Service

TRACE_ID, PARENT_ID = bytes.fromhex(TRACEPARENT.split("-")[1]), bytes.fromhex(TRACEPARENT.split("-")[2])
RECORD = RequestRecord(
    Origin(0.0, "r", "team", "Generate", "demo", traceparent=TRACEPARENT),
    "",
    1000.0,
    4.0,
    (FinishReason.EOS, FinishReason.MAX_TOKENS),
    Usage(100, 64, 30),
    20,
    2,
    0.5,
    1.5,
    3.5,
)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector on its own port."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


def attributes_of(message: Any) -> dict[str, Any]:
    found = {}
    for each in message.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def sent(collector: Collector, record: RequestRecord) -> list[Span]:
    spans = RequestSpans(collector.endpoint, "pod-7")
    spans.ended(record)
    spans.close()
    return collector.spans


def test_a_request_is_a_child_span_of_its_caller_with_a_child_for_each_phase(collector: Collector) -> None:
    by_name = {span.name: span for span in sent(collector, RECORD)}
    root = by_name.pop("photon_grpc.v1.InferenceService/Generate")
    assert (root.trace_id, root.parent_span_id, root.kind) == (TRACE_ID, PARENT_ID, Span.SPAN_KIND_SERVER)
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (996 * 10**9, 1000 * 10**9)
    assert [(event.name, event.time_unix_nano) for event in root.events] == [("first_token", 997_500_000_000)]
    assert {
        name: (span.start_time_unix_nano / 1e9 - 996, span.end_time_unix_nano / 1e9 - 996)
        for name, span in by_name.items()
    } == {"queue": (0, 0.5), "prefill": (0.5, 1.5), "decode": (1.5, 3.5)}
    assert all((span.trace_id, span.parent_span_id) == (TRACE_ID, root.span_id) for span in by_name.values())
    assert attributes_of(root) == {
        "rpc.system.name": "grpc",
        "rpc.method": "photon_grpc.v1.InferenceService/Generate",
        "rpc.response.status_code": "OK",
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "photon-grpc",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": "r",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ["eos", "max_tokens"],
        "gen_ai.response.time_to_first_chunk": 1.5,
        "photon.preemption_count": 2,
        "photon.api_key.name": "team",
    }
    (resource,) = {request.resource_spans[0].resource.SerializeToString() for request in collector.requests}
    attributes = attributes_of(collector.requests[0].resource_spans[0].resource)
    assert (attributes["service.name"], attributes["service.instance.id"]) == ("photon-grpc", "pod-7")
    assert resource


def test_the_environment_names_the_service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    sent(collector, RECORD)
    assert attributes_of(collector.requests[0].resource_spans[0].resource)["service.name"] == "chat"


@pytest.mark.parametrize(
    ("reason", "code", "is_error"),
    [
        ("NUMERIC_FAILURE", "INTERNAL", True),
        ("DEADLINE_PASSED", "DEADLINE_EXCEEDED", True),
        ("CANCELLED", "CANCELLED", False),
        ("QUEUE_FULL", "RESOURCE_EXHAUSTED", False),
    ],
)
def test_a_failed_span_has_a_reason_and_only_server_failures_are_errors(
    collector: Collector, reason: str, code: str, is_error: bool
) -> None:
    (span,) = sent(collector, RequestRecord(Origin(0.0, "r", method="StreamGenerate"), reason, 1000.0, 1.0))
    attributes = attributes_of(span)
    assert (attributes["error.type"], attributes["rpc.response.status_code"]) == (reason, code)
    assert (span.status.code == Status.STATUS_CODE_ERROR) is is_error
    assert "gen_ai.request.model" not in attributes and not span.parent_span_id


@pytest.mark.parametrize("header", ["", "nonsense", "ff" + TRACEPARENT[2:], "00-" + "0" * 32 + TRACEPARENT[35:]])
def test_an_invalid_traceparent_starts_a_new_trace(collector: Collector, header: str) -> None:
    spans = sent(collector, RequestRecord(Origin(0.0, "r", method="Generate", traceparent=header), "", 1000.0, 1.0))
    assert [bool(span.parent_span_id) for span in spans] == [False]
    assert spans[0].trace_id not in (bytes(16), TRACE_ID)


def test_what_its_caller_does_not_sample_is_not_sent(collector: Collector) -> None:
    origin = Origin(0.0, "r", method="Generate", traceparent=TRACEPARENT[:-2] + "00")
    assert sent(collector, RequestRecord(origin, "", 1000.0, 1.0, queue_s=0.1)) == []


class Traced(Service):
    def __init__(self, pool: ThreadPoolExecutor, endpoint: str) -> None:
        super().__init__(pool)
        self.spans = RequestSpans(endpoint, "pod-7")

    def ended(self, record: RequestRecord) -> None:
        super().ended(record)
        self.spans.ended(record)


@pytest.fixture
async def service(collector: Collector) -> AsyncIterator[Traced]:
    with ThreadPoolExecutor(1) as pool:
        service = Traced(pool, collector.endpoint)
        (address,) = await service.server.start(("127.0.0.1:0",), reuse_port=False)
        async with grpc.aio.insecure_channel(address) as channel:
            service.stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield service
        await service.server.drain_and_stop(0)


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "MultiplexGenerate"])
async def test_every_method_carries_its_callers_context_and_no_text(
    service: Traced, collector: Collector, method: str
) -> None:
    caller = await service.begun(method)
    service.link.step((1, TOKEN), finished=(done(1),))
    await caller
    await service.record()
    await asyncio.to_thread(service.spans.close)
    assert {span.name for span in collector.spans} == {
        f"photon_grpc.v1.InferenceService/{method}",
        "queue",
        "prefill",
        "decode",
    }
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert all(SECRET.encode() not in request.SerializeToString() for request in collector.requests)


async def test_a_failed_request_is_an_error_in_its_callers_trace(service: Traced, collector: Collector) -> None:
    caller = await service.begun("StreamGenerate")
    service.link.step(failed=(Failed.of(1, NumericFailure("not a number")),))
    await caller
    await service.record()
    await asyncio.to_thread(service.spans.close)
    (root,) = (span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
    assert attributes_of(root)["error.type"] == "NUMERIC_FAILURE"
    assert (root.trace_id, root.status.code) == (TRACE_ID, Status.STATUS_CODE_ERROR)


@pytest.mark.parametrize("prepare", [lambda listener: None, lambda listener: listener.listen()], ids=["none", "silent"])
def test_a_missing_collector_loses_spans_and_is_logged_once(
    prepare: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`ended` never waits, waiting spans are bounded, `close` returns, and the log is not flooded."""
    monkeypatch.setattr(spans_module, "_MAX_WAITING", 16)
    monkeypatch.setattr(spans_module, "_BATCH_SIZE", 8)
    monkeypatch.setattr(spans_module, "_CLOSING_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        prepare(listener)
        spans = RequestSpans(f"http://127.0.0.1:{listener.getsockname()[1]}", "pod-7")
        is_over = threading.Event()

        def tell() -> None:
            for _ in range(500):
                spans.ended(RECORD)
            spans.close()
            is_over.set()

        threading.Thread(target=tell, daemon=True).start()
        assert is_over.wait(240)
    assert len(caplog.records) <= 1


@pytest.mark.parametrize("endpoint", ["collector", "ftp://collector:4317", "http://collector", "unix:/run/otel.sock"])
def test_an_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        resolve({"otlp_endpoint": endpoint}, {})


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"otlp_endpoint": "http://collector:4317"}, {}).config.server
    monkeypatch.setitem(sys.modules, "photon_grpc.observe.spans", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[otel\]'"), tracing(config, "pod-7"):
        pass


def test_without_a_collector_there_is_no_tracing() -> None:
    with tracing(resolve({}, {}).config.server, "pod-7") as observers:
        assert observers == ()
