"""The W3C trace context of the current span, sent to the server with a call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

#: gRPC metadata of one call or of all calls.
Metadata = tuple[tuple[str, str], ...]

_KEYS = frozenset({"traceparent", "tracestate"})


def with_trace_context(metadata: Sequence[tuple[str, str]]) -> Metadata:
    """Return `metadata`, with the current OpenTelemetry span added if there is one and `metadata` has none."""
    # OpenTelemetry is not a dependency of ours; a program that has not imported it has no current span.
    if "opentelemetry.trace" not in sys.modules or any(key.lower() in _KEYS for key, _ in metadata):
        return tuple(metadata)
    carrier: dict[str, str] = {}
    # Writes nothing without a current span.
    _propagator().inject(carrier)
    return (*metadata, *carrier.items())


@cache
def _propagator() -> Any:
    return import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
