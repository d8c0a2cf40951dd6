"""Counts calls by method and status: rate, errors, duration. Outermost, so that it sees how every call ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from photon_grpc.core.counts import Counts, Labels
from photon_grpc.errors import DeadlinePassed
from photon_grpc.server import metadata, methods, metrics
from photon_grpc.server.interceptors.errors import MethodHandler
from photon_grpc.server.metadata import Context

Behavior = Callable[[Any, Context], Awaitable[Any]]


class MetricsInterceptor(grpc.aio.ServerInterceptor):
    """Stands outside ErrorInterceptor, whose handlers are coroutines that take all messages of a call as a stream."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        #: Method -> the handler of its last call, observed: the same at every call.
        self._observed: dict[Labels, tuple[MethodHandler, MethodHandler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        labels = methods.labels(handler_call_details.method)
        self._counts.add(metrics.STARTED, *labels)
        handler = await continuation(handler_call_details)
        if handler is None:
            self._ended(labels, time.monotonic(), grpc.StatusCode.UNIMPLEMENTED.name)
            return None
        known, observed = self._observed.get(labels, (None, None))
        if observed is None or known is not handler:
            observed = self._observing(handler, labels)
            self._observed[labels] = handler, observed
        return observed

    def _observing(self, handler: Any, labels: Labels) -> MethodHandler:
        """The same method, its calls counted as they end."""
        if handler.response_streaming:
            call = partial(self._call, labels, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(call, None, handler.response_serializer)
        call = partial(self._call, labels, handler.stream_unary)
        return grpc.stream_unary_rpc_method_handler(call, None, handler.response_serializer)

    async def _call(self, labels: Labels, behavior: Behavior, messages: Any, context: Context) -> Any:
        started_s = time.monotonic()
        origin = metadata.origin(context, "")
        code = grpc.StatusCode.UNKNOWN
        try:
            response = await behavior(messages, context)
            code = _told(context) or grpc.StatusCode.OK
            return response
        except asyncio.CancelledError as error:
            is_late = origin.reason(error) == DeadlinePassed.reason
            code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.BaseError:  # an `abort`
            code = _told(context) or code
            raise
        finally:
            self._ended(labels, started_s, code.name)

    def _ended(self, labels: Labels, started_s: float, code: str) -> None:
        self._counts.add(metrics.HANDLED, *labels, code)
        self._counts.observe(metrics.HANDLING_S, time.monotonic() - started_s, *labels)


def _told(context: Context) -> grpc.StatusCode | None:
    """The status that a method has set; None: none, whatever the stubs say."""
    return context.code()
