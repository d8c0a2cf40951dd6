"""Spans of requests, if a collector is configured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from photon_grpc.config.flags import ServerConfig
from photon_grpc.errors import ConfigError
from photon_grpc.frontend.record import RequestObserver


@contextmanager
def tracing(config: ServerConfig, replica_id: str) -> Iterator[tuple[RequestObserver, ...]]:
    """Yield the observers that make spans; send the last spans at the end. Raise ConfigError."""
    if not config.otlp_endpoint:
        yield ()
        return
    check_tracing(config)
    # Part of an extra, which may not be installed.
    from photon_grpc.observe.spans import RequestSpans

    spans = RequestSpans(config.otlp_endpoint, replica_id)
    try:
        yield (spans,)
    finally:
        spans.close()


def check_tracing(config: ServerConfig) -> None:
    """Raise ConfigError if a collector is configured and OpenTelemetry is missing."""
    if not config.otlp_endpoint:
        return
    try:
        import photon_grpc.observe.spans  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name}): pip install '.[otel]' in the clone",
            field="--otlp-endpoint",
        ) from None
