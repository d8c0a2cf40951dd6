"""The outermost interceptor, which takes every call from its headers to its end.

It admits the call, receives and parses its messages, runs the method, and ends a failed call with one `abort` that
carries details and trailers. Messages are parsed here because grpc.aio would deserialize them before any handler runs
and answer UNKNOWN for malformed bytes. Nothing that a caller wrote is logged, and the text of an unexpected exception
never leaves the process, since it may quote a prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from photon_grpc.access.places import Places
from photon_grpc.core.ask import is_out_of_time
from photon_grpc.core.counts import Labels
from photon_grpc.errors import NotAllowed
from photon_grpc.server.calls import metadata, methods
from photon_grpc.server.calls.call import Call, CallCounts, CallEnding, CallFailures, Trailers, begin_call, current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.calls.receiver import MessageReceiver
from photon_grpc.server.wire.unknown import refusing_unknown

MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

#: Limit of a message in a stream of requests; reflection requests hold only names.
MAX_STREAMED_BYTES = 64 * 1024
#: Path -> limit of a streamed message, for methods that take prompts: the same as for a single message.
_MAX_BYTES = {methods.MULTIPLEX: 2**31}


class KeyCheck(Protocol):
    def admit(self, call: Call, details: grpc.HandlerCallDetails, *, is_served: bool) -> None:
        """Set the call's owner. Raise NotAllowed."""


#: Path -> method, of none.
NO_METHODS: Mapping[str, methods.Method] = {}


class _NoKeys:
    """A check that admits every call."""

    def admit(self, call: Call, details: grpc.HandlerCallDetails, *, is_served: bool) -> None:
        pass


NO_KEYS = _NoKeys()


class _NoCounts:
    """Counters that count nothing."""

    def started(self, labels: Labels) -> None:
        pass

    def ended(self, labels: Labels, code: str, duration_s: float) -> None:
        pass


NO_COUNTS = _NoCounts()


@dataclass(frozen=True, slots=True)
class CallRules:
    """The rules for calls on all listeners of a replica."""

    failures: CallFailures
    #: The value of x-photon-replica.
    replica_id: str = ""
    keys: KeyCheck = NO_KEYS
    counts: CallCounts = NO_COUNTS


def no_trailers() -> Trailers:
    return ()


def no_numerics() -> str:
    return ""


class Guard(grpc.aio.ServerInterceptor):
    """An interceptor that wraps every method of every service, unary or streaming."""

    def __init__(
        self,
        rules: CallRules,
        load_report: Callable[[], Trailers] = no_trailers,
        numerics_version: Callable[[], str] = no_numerics,
        reading: Sequence[Places] = (),
        served: Mapping[str, methods.Method] = NO_METHODS,
    ) -> None:
        """Take the rules, what calls of our own services are told, and the places of streams of requests.

        `served` has the methods by path that are served beside ours.
        """
        self._keys = rules.keys
        self._counts = rules.counts
        self._served = served
        self._ending = CallEnding(rules.replica_id, rules.failures, load_report, numerics_version, served)
        self._receiver = MessageReceiver(reading)
        #: Path -> the wrapped method.
        self._methods: dict[str, MethodHandler] = {}
        self._refusing = self._guarded(grpc.stream_stream_rpc_method_handler(_refuse), methods.UNKNOWN.path)
        #: Refuses calls with too many headers, whatever their method.
        self._oversized = self._guarded(
            grpc.stream_stream_rpc_method_handler(metadata.refuse_oversized), methods.UNKNOWN.path
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        path = handler_call_details.method
        headers = metadata.headers_of(handler_call_details.invocation_metadata)
        call = Call(path, self._ending, headers, self._served.get(path))
        begin_call(call)
        self._counts.started(call.method.labels)
        if headers is None:
            return self._oversized
        handler = await continuation(handler_call_details)
        try:
            self._keys.admit(call, handler_call_details, is_served=handler is not None)
        except NotAllowed as error:
            # Raised later, when the call is answered: raised here, gRPC would end it without details.
            call.refusal = error
            return self._refusing
        if handler is None:
            self._counts.ended(call.method.labels, grpc.StatusCode.UNIMPLEMENTED.name, 0.0)
            return None
        return self._methods.get(path) or self._methods.setdefault(path, self._guarded(handler, path))

    def _guarded(self, handler: Any, path: str) -> MethodHandler:
        """Wrap a method for gRPC as one that streams requests, so that we read its messages ourselves."""
        answer = _Method(handler, self._receiver, self._counts, _MAX_BYTES.get(path, MAX_STREAMED_BYTES)).answer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answer, None, _serializer(handler.response_serializer))
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)


class _Method:
    """A wrapped method: the steps of a call in order."""

    def __init__(self, handler: Any, receiver: MessageReceiver, counts: CallCounts, max_bytes: int) -> None:
        """Wrap `handler`; `max_bytes` limits each message of a stream of requests."""
        self._behavior = _behavior(handler)
        self._parse = refusing_unknown(handler.request_deserializer or _unparsed)
        self._takes_stream = handler.request_streaming
        self._receiver = receiver
        self._counts = counts
        self._max_bytes = max_bytes

    async def answer(self, messages: Any, context: Context) -> Any:
        call, code = current(), grpc.StatusCode.UNKNOWN
        try:
            response = await self._answer(call, context)
            code = _set_code(context) or grpc.StatusCode.OK
            return response
        except asyncio.CancelledError:
            is_late = is_out_of_time(call.started_s, call.deadline_s)
            code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.BaseError:  # an `abort`
            code = _set_code(context) or code
            raise
        finally:
            self._counts.ended(call.method.labels, code.name, time.monotonic() - call.started_s)

    async def _answer(self, call: Call, context: Context) -> Any:
        try:
            call.begin(context)
            if self._takes_stream:
                request = self._receiver.messages(call, self._parse, self._max_bytes)
            else:
                request = await self._receiver.message(call, self._parse)
            response = self._behavior(request, context)
            del request  # it may hold megabytes
            response = await response
            if call.ending is not None:
                context.set_trailing_metadata((*call.trailers, *call.ending.trailers(call.method.path)))
            return response
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None
        except grpc.aio.BaseError:
            # Already ended by an `abort`.
            raise
        except Exception as error:
            await call.fail(error)


async def _refuse(messages: Any, context: Context) -> NoReturn:
    raise current().refusal or NotAllowed("the call is not admitted")


def _behavior(handler: Any) -> Callable[[Any, Context], Awaitable[Any]]:
    """Return the coroutine function that answers a call. For a streaming method it writes the messages."""
    if not handler.response_streaming:
        return handler.stream_unary or handler.unary_unary  # type: ignore[no-any-return]
    behavior = handler.stream_stream or handler.unary_stream
    return behavior if inspect.iscoroutinefunction(behavior) else _writing(behavior)


def _writing(generate: Callable[[Any, Context], AsyncIterator[Any]]) -> Callable[[Any, Context], Awaitable[None]]:
    """Turn an async generator into a coroutine that writes what it yields."""

    async def call(request: Any, context: Context) -> None:
        async for message in generate(request, context):
            await context.write(message)

    return call


def _serializer(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a serializer that passes bytes on, which are messages in wire form already."""
    return lambda message: message if type(message) is bytes else serialize(message)


def _unparsed(message: bytes) -> bytes:
    return message


def _set_code(context: Context) -> grpc.StatusCode | None:
    """Return the status set by the method; None if it set none, which gRPC's stubs do not mention."""
    return context.code()
