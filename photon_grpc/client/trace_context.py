"""The span in which a call is made, told to the server as W3C trace context, which is what servers read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

#: gRPC's metadata: of one call, or of all.
Metadata = tuple[tuple[str, str], ...]

_KEYS = frozenset({"traceparent", "tracestate"})


def with_trace_context(metadata: Sequence[tuple[str, str]]) -> Metadata:
    """`metadata` and the current span of OpenTelemetry, where there is one and `metadata` names none itself."""
    # OpenTelemetry is no dependency of ours; a program that has not imported it has no current span.
    if "opentelemetry.trace" not in sys.modules or any(key.lower() in _KEYS for key, _ in metadata):
        return tuple(metadata)
    carrier: dict[str, str] = {}
    # Writes nothing where no span is current.
    _propagator().inject(carrier)
    return (*metadata, *carrier.items())


@cache
def _propagator() -> Any:
    return import_module("opentelemetry.trace.propagation.tracecontext").TraceContextTextMapPropagator()
