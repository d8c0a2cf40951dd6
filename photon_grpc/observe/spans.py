"""OpenTelemetry spans, made from the record of a request when it has ended.

Attributes are those of the semantic conventions for generative AI and for RPC. None holds text of a prompt or output.
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from photon_grpc import __version__
from photon_grpc.frontend.record import RequestRecord
from photon_grpc.observe.codes import code_of_reason
from photon_grpc.v1 import inference_pb2

_LOG = logging.getLogger(__name__)
#: The key that the propagator reads.
_TRACEPARENT = "traceparent"
_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
#: Spans that wait to be sent. More are dropped.
_MAX_WAITING = 8192
_BATCH_SIZE = 512
_SEND_INTERVAL_S = 1.0
_SEND_TIMEOUT_S = 5.0
_WARNING_INTERVAL_S = 60.0
#: Time to send what waits when the server ends.
_CLOSING_S = 1.0

#: Codes that are the server's fault. https://opentelemetry.io/docs/specs/semconv/rpc/grpc/
_FAULTS = frozenset(("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"))


class RequestSpans:
    """A RequestObserver that sends spans from its own thread. If the collector is gone or slow, only spans are lost."""

    def __init__(self, endpoint: str, replica_id: str) -> None:
        """Send to `endpoint`: http://HOST:PORT in plain text, or https://HOST:PORT."""
        own = Resource(
            {"service.name": "photon-grpc", "service.version": __version__, "service.instance.id": replica_id}
        )
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _Exporter(endpoint, timeout=_SEND_TIMEOUT_S)
        # OpenTelemetry logs every attempt and every dropped span.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, _MAX_WAITING, _SEND_INTERVAL_S * 1000, _BATCH_SIZE)
        )
        self._tracer = self._provider.get_tracer("photon_grpc", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, record: RequestRecord) -> None:
        origin = record.origin
        end_ns = round(record.end_time_s * 1e9)
        start_ns = end_ns - round(record.total_s * 1e9)
        span = self._tracer.start_span(
            _full_name(origin.method),
            self._propagator.extract({_TRACEPARENT: origin.traceparent}),
            SpanKind.SERVER,
            start_time=start_ns,
        )
        if span.is_recording():
            span.set_attributes(dict(_attributes(record)))
            if code_of_reason(record.reason) in _FAULTS:
                span.set_status(Status(StatusCode.ERROR))
            if record.first_token_s is not None:
                span.add_event("first_token", timestamp=start_ns + round(record.first_token_s * 1e9))
            for name, begin_s, end_s in _phases(record):
                phase = self._tracer.start_span(
                    name, set_span_in_context(span), start_time=start_ns + round(begin_s * 1e9)
                )
                phase.end(start_ns + round(end_s * 1e9))
        span.end(end_ns)

    def close(self) -> None:
        """Send what waits, for at most a second."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_CLOSING_S)


class _Exporter(OTLPSpanExporter):
    """An exporter that logs lost spans at most once a minute."""

    _warned_s = float("-inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS and time.monotonic() - self._warned_s > _WARNING_INTERVAL_S:
            self._warned_s = time.monotonic()
            _LOG.warning("--otlp-endpoint: the collector accepts no spans; they are dropped")
        return result


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yield (name, begin, end) of the phases that the request reached, in seconds from arrival."""
    if record.queue_s is None:
        return
    yield "queue", 0.0, record.queue_s
    if record.first_token_s is not None:
        yield "prefill", record.queue_s, record.first_token_s
        if record.last_token_s is not None:
            yield "decode", record.first_token_s, record.last_token_s


def _full_name(method: str) -> str:
    """Return service and method; those of operators' own services have both already."""
    return method if "/" in method else f"{_SERVICE}/{method}"


def _attributes(record: RequestRecord) -> Iterator[tuple[str, str | int | float | list[str]]]:
    origin, usage = record.origin, record.usage
    yield "rpc.system.name", "grpc"
    yield "rpc.method", _full_name(origin.method)
    yield "rpc.response.status_code", code_of_reason(record.reason)
    if record.reason:
        yield "error.type", record.reason
    yield "gen_ai.operation.name", "generate_content"
    yield "gen_ai.provider.name", "photon-grpc"
    if origin.model:
        yield "gen_ai.request.model", origin.model
        yield "gen_ai.response.model", origin.model
    yield "gen_ai.response.id", origin.request_id
    yield "gen_ai.usage.input_tokens", usage.prompt_tokens
    yield "gen_ai.usage.cache_read.input_tokens", usage.cached_prompt_tokens
    yield "gen_ai.usage.output_tokens", usage.output_tokens
    if len(record.finish_reasons) > 1:
        yield "gen_ai.request.choice.count", len(record.finish_reasons)
    if record.finish_reasons and not record.reason:
        yield "gen_ai.response.finish_reasons", [reason.name.lower() for reason in record.finish_reasons]
    if record.first_token_s is not None:
        yield "gen_ai.response.time_to_first_chunk", record.first_token_s
    yield "photon.preemption_count", record.num_preemptions
    if origin.owner:
        yield "photon.api_key.name", origin.owner
    for key, value in origin.labels:
        yield f"photon.label.{key}", value
