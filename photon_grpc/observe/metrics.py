"""The metrics for Prometheus.

A name is `photon_` and vLLM's suffix if the meaning is the same. Metrics of calls have the names of gRPC's
interceptors. Buckets are vLLM's, with finer ones below. API keys appear by the name in their file. No other label holds
text from a caller, except the values of request labels that --metrics-label names. The supervisor loads this module,
so it imports no grpc.
"""

from __future__ import annotations

from collections.abc import Iterable

from photon_grpc.core.counts import Counts, Labels, Metric
from photon_grpc.core.generation import Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import (
    Cancelled,
    IdleStreamEvicted,
    MalformedMessage,
    MissingCredentials,
    NotAllowed,
    Overloaded,
    RequestError,
    Unavailable,
    reasons_of,
)
from photon_grpc.frontend.record import NO_USAGE, RequestRecord

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
#: Values of a request label with series of their own, in each front end; more are counted under OTHER.
MAX_LABEL_VALUES = 64
OTHER = "other"
_HTTP_METHODS = ("GET", "HEAD", "POST", "OPTIONS")
_METHOD = ("grpc_type", "grpc_service", "grpc_method")

#: Base classes that are never raised, and reasons that end calls before they are requests. Cancelled is its own metric.
_NOT_OF_REQUESTS = {
    *(cls.reason for cls in (RequestError, NotAllowed, Overloaded, Unavailable)),
    *(cls.reason for cls in (MissingCredentials, MalformedMessage, IdleStreamEvicted, Cancelled)),
}
#: Reasons for which a request ends without an answer.
_FAILURES = tuple(reason for reason in reasons_of(RequestError, Unavailable) if reason not in _NOT_OF_REQUESTS)

SUCCESS = Metric(
    "photon_request_success_total",
    "Outputs of requests that were answered, by how they ended.",
    ("finished_reason",),
    known=tuple(reason.name.lower() for reason in FinishReason if reason),
)
ANSWERED = Metric("photon_requests_answered_total", "Requests that were answered, whatever ended their outputs.")
REJECTED = Metric(
    "photon_requests_rejected_total", "Requests refused or failed before any output.", ("reason",), known=_FAILURES
)
FAILED = Metric(
    "photon_requests_failed_total", "Requests that failed after output began.", ("reason",), known=_FAILURES
)
CANCELLED = Metric("photon_requests_cancelled_total", "Requests whose caller cancelled them or was lost.")
LOST = Metric("photon_requests_lost_total", "Requests in the engine whose front end died; the request log lacks them.")
QUEUE_S = Metric("photon_request_queue_time_seconds", "From arrival to the first step.", bounds=_REQUEST_S)
PREFILL_S = Metric("photon_request_prefill_time_seconds", "From the first step to the first token.", bounds=_REQUEST_S)
FIRST_TOKEN_S = Metric("photon_time_to_first_token_seconds", "From arrival to the first token.", bounds=_FIRST_TOKEN_S)
DECODE_S = Metric("photon_request_decode_time_seconds", "From the first token to the last.", bounds=_REQUEST_S)
TOKEN_S = Metric(
    "photon_request_time_per_output_token_seconds",
    "Mean time between two tokens of an output, once for each request.",
    bounds=_TOKEN_S,
)
LATENCY_S = Metric(
    "photon_e2e_request_latency_seconds", "From arrival to the end, of requests that had a step.", bounds=_REQUEST_S
)
PROMPT_TOKENS = Metric(
    "photon_request_prompt_tokens", "Prompt tokens billed to requests that had a step.", bounds=_TOKENS
)
GENERATION_TOKENS = Metric(
    "photon_request_generation_tokens", "Output tokens billed to requests that had a step.", bounds=_TOKENS
)
PROMPT_TOKENS_BY_KEY = Metric(
    "photon_prompt_tokens_by_key_total", "Prompt tokens billed to the requests of an API key.", ("key",)
)
GENERATION_TOKENS_BY_KEY = Metric(
    "photon_generation_tokens_by_key_total", "Output tokens billed to the requests of an API key.", ("key",)
)
REQUESTS_BY_LABEL = Metric(
    "photon_requests_by_label_total",
    "Requests that ended, by the labels that --metrics-label names.",
    ("label", "value", "outcome"),
)
GENERATION_TOKENS_BY_LABEL = Metric(
    "photon_generation_tokens_by_label_total",
    "Output tokens billed to requests, by the labels that --metrics-label names.",
    ("label", "value"),
)
LOOP_LAG_S = Metric(
    "photon_event_loop_lag_seconds",
    "Lateness of a 50 ms timer on the event loops of front ends.",
    bounds=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
STARTED = Metric("grpc_server_started_total", "Calls that came.", _METHOD)
HANDLED = Metric("grpc_server_handled_total", "Calls that ended, by their status.", (*_METHOD, "grpc_code"))
HANDLING_S = Metric("grpc_server_handling_seconds", "Duration of calls.", _METHOD, _REQUEST_S)

HTTP_REQUESTS = Metric(
    "http_requests_total", "HTTP calls that ended, by their status.", ("handler", "method", "status")
)
HTTP_DURATION_S = Metric("http_request_duration_seconds", "Duration of HTTP calls.", ("handler",), _REQUEST_S)
HTTP_IGNORED = Metric(
    "photon_http_ignored_fields_total", "Fields of HTTP calls that were accepted without effect.", ("field",)
)

#: All that front ends count.
COUNTED = (
    *(SUCCESS, ANSWERED, REJECTED, FAILED, CANCELLED, LOST),
    *(QUEUE_S, PREFILL_S, FIRST_TOKEN_S, DECODE_S, TOKEN_S, LATENCY_S, PROMPT_TOKENS, GENERATION_TOKENS),
    *(PROMPT_TOKENS_BY_KEY, GENERATION_TOKENS_BY_KEY, REQUESTS_BY_LABEL, GENERATION_TOKENS_BY_LABEL),
    *(LOOP_LAG_S, STARTED, HANDLED, HANDLING_S, HTTP_REQUESTS, HTTP_DURATION_S, HTTP_IGNORED),
)


class RequestMetrics:
    """Counters of requests; a RequestObserver."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def ended(self, record: RequestRecord) -> None:
        self._count_end(record)
        if record.queue_s is None:
            return
        self._counts.observe(PROMPT_TOKENS, record.usage.prompt_tokens)
        self._counts.observe(GENERATION_TOKENS, record.usage.output_tokens)
        for metric, value in (
            (QUEUE_S, record.queue_s),
            (PREFILL_S, record.prefill_s),
            (FIRST_TOKEN_S, record.first_token_s),
            (DECODE_S, record.decode_s),
            (TOKEN_S, record.time_per_output_token_s),
            (LATENCY_S, record.total_s),
        ):
            if value is not None:
                self._counts.observe(metric, value)

    def _count_end(self, record: RequestRecord) -> None:
        if not record.reason:
            self._counts.add(ANSWERED)
            for reason in record.finish_reasons:
                self._counts.add(SUCCESS, finished_reason(reason))
        elif record.reason == Cancelled.reason:
            self._counts.add(CANCELLED)
        else:
            self._counts.add(FAILED if record.usage.output_tokens else REJECTED, record.reason)


class CallMetrics:
    """Counters of calls by method and status: rate, errors, duration."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def started(self, labels: Labels) -> None:
        self._counts.add(STARTED, *labels)

    def ended(self, labels: Labels, code: str, duration_s: float) -> None:
        self._counts.add(HANDLED, *labels, code)
        self._counts.observe(HANDLING_S, duration_s, *labels)


class HttpMetrics:
    """Counters of HTTP calls by route and status."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def ended(self, route: str, method: str, status: int, duration_s: float) -> None:
        self._counts.add(HTTP_REQUESTS, route, method if method in _HTTP_METHODS else OTHER, str(status))
        self._counts.observe(HTTP_DURATION_S, duration_s, route)

    def ignored(self, field: str) -> None:
        self._counts.add(HTTP_IGNORED, field)


class KeyMetrics:
    """Counters of tokens by API key; a RequestObserver."""

    def __init__(self, counts: Counts, keys: Iterable[str]) -> None:
        """Start the names in `keys` at 0. Others appear with their first request."""
        self._counts = counts
        for key in keys:
            self._add(key, NO_USAGE)

    def ended(self, record: RequestRecord) -> None:
        if record.origin.owner:
            self._add(record.origin.owner, record.usage)

    def _add(self, key: str, usage: Usage) -> None:
        self._counts.add(PROMPT_TOKENS_BY_KEY, key, amount=usage.prompt_tokens)
        self._counts.add(GENERATION_TOKENS_BY_KEY, key, amount=usage.output_tokens)


class LabelMetrics:
    """Counters of requests by their labels; a RequestObserver.

    Values come from callers, so each front end counts at most MAX_LABEL_VALUES of a label and the rest as OTHER.
    """

    def __init__(self, counts: Counts, keys: Iterable[str]) -> None:
        """Count by the labels in `keys`."""
        self._counts = counts
        #: Label -> the values that have series.
        self._values: dict[str, set[str]] = {key: set() for key in keys}

    def ended(self, record: RequestRecord) -> None:
        for key, value in record.origin.labels:
            if (values := self._values.get(key)) is None:
                continue
            if len(values) < MAX_LABEL_VALUES:
                values.add(value)
            counted = value if value in values else OTHER
            self._counts.add(REQUESTS_BY_LABEL, key, counted, _outcome(record))
            self._counts.add(GENERATION_TOKENS_BY_LABEL, key, counted, amount=record.usage.output_tokens)


def _outcome(record: RequestRecord) -> str:
    if not record.reason:
        return "answered"
    if record.reason == Cancelled.reason:
        return "cancelled"
    return "failed" if record.usage.output_tokens else "rejected"


def finished_reason(reason: FinishReason) -> str:
    """Return the label value of `reason`, for example `max_tokens`."""
    return reason.name.lower()
