"""Outermost: names the call, parses its messages, and ends every failed call with one `abort` that carries details and
trailers.

Parsing happens here because grpc.aio deserialises before any handler runs and answers UNKNOWN for bytes that are no
message. Nothing that a caller wrote is logged, and no text of an unforeseen exception leaves the process: it may quote
a prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import grpc

from photon_grpc.errors import NotAllowed
from photon_grpc.server import metadata, methods, multiplex
from photon_grpc.server.interceptors.failure_log import FailureLog
from photon_grpc.server.interceptors.intake import Fail, Intake, Parse
from photon_grpc.server.metadata import Context
from photon_grpc.server.places import Places
from photon_grpc.server.status import CallStatus, call_status

MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
#: Awaits what a method is given: its one message, or all of them as a stream.
Read = Callable[[AsyncIterator[bytes], Context, Fail], Awaitable[Any]]
Respond = Callable[[Fail], Awaitable[Any]]
#: Awaits a call, and ends it.
Guard = Callable[[Context, Respond], Awaitable[Any]]
Trailers = tuple[tuple[str, str | bytes], ...]

#: The load is told to callers of these services, whom the API keys have let in; health checks need no key.
_TOLD_THE_LOAD = "/photon_grpc.v1."


def no_trailers() -> Trailers:
    return ()


class _Ending(NamedTuple):
    """Endings of one method's calls."""

    #: Its path, or "unknown".
    method: str
    failures: FailureLog
    replica_id: str
    #: Of every call, beside its replica and those of a failure.
    trailers: Callable[[], Trailers]

    @property
    def replica(self) -> tuple[str, str]:
        return metadata.REPLICA_KEY, self.replica_id


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of every service, whatever its shape."""

    def __init__(
        self,
        replica_id: str,
        load_report: Callable[[], Trailers] = no_trailers,
        failures: FailureLog | None = None,
        *,
        reading: Sequence[Places] = (),
    ) -> None:
        """`load_report`: trailers of the calls of our own services. `reading`: places of streams of requests."""
        self._replica_id = replica_id
        self._load_report = load_report
        self._failures = failures or FailureLog()
        self._intake = Intake(reading)
        #: Method -> the handler of its last call, guarded: the same at every call but one that is refused within.
        self._guarded: dict[str, tuple[MethodHandler, MethodHandler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        method = methods.name(handler_call_details.method)
        taken = metadata.take(handler_call_details.invocation_metadata)
        handler = await continuation(handler_call_details) if taken else _OVERSIZED
        if handler is None:
            return None
        known, guarded = self._guarded.get(method, (None, None))
        if guarded is None or known is not handler:
            trailers = self._load_report if method.startswith(_TOLD_THE_LOAD) else no_trailers
            guarded = _guarded(handler, _Ending(method, self._failures, self._replica_id, trailers), self._intake)
            self._guarded[method] = handler, guarded
        return guarded


#: Of every call that brings too many headers, whatever its method.
_OVERSIZED: MethodHandler = grpc.stream_stream_rpc_method_handler(metadata.refuse_oversized)


def _guarded(handler: Any, ending: _Ending, intake: Intake) -> MethodHandler:
    """The same method to callers; to gRPC one that reads its messages itself, also where it is only one."""
    parse = _parser(handler.request_deserializer)
    guard = partial(_guard, ending)
    read = _stream_reader(ending.method, parse, intake) if handler.request_streaming else _message_reader(parse, intake)
    if handler.response_streaming:
        wrapped = _responding_stream(handler, guard, read)
        return grpc.stream_stream_rpc_method_handler(wrapped, None, _serializer(handler.response_serializer))
    return grpc.stream_unary_rpc_method_handler(
        _responding_once(handler, guard, read), None, handler.response_serializer
    )


def _message_reader(parse: Parse, intake: Intake) -> Read:
    async def read(messages: AsyncIterator[bytes], context: Context, fail: Fail) -> Any:
        return await intake.message(context, parse, fail)

    return read


#: In a stream of requests; reflection asks for names.
MAX_STREAMED_BYTES = 64 * 1024
#: Of methods that take prompts: as in a call with one message.
_MAX_BYTES = {multiplex.METHOD: 2**31}


def _stream_reader(method: str, parse: Parse, intake: Intake) -> Read:
    max_bytes = _MAX_BYTES.get(method, MAX_STREAMED_BYTES)

    async def read(messages: AsyncIterator[bytes], context: Context, fail: Fail) -> Any:
        return intake.messages(context, parse, max_bytes, fail)

    return read


def _responding_once(handler: Any, guard: Guard, read: Read) -> Callable[[Any, Context], Awaitable[Any]]:
    behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def call(messages: Any, context: Context) -> Any:
        async def answer(fail: Fail) -> Any:
            return await behavior(await read(messages, context, fail), context)

        return await guard(context, answer)

    return call


def _responding_stream(handler: Any, guard: Guard, read: Read) -> Callable[[Any, Context], Awaitable[None]]:
    behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
    writes = behavior if inspect.iscoroutinefunction(behavior) else _writing(behavior)

    async def call(messages: Any, context: Context) -> None:
        async def answer(fail: Fail) -> None:
            await writes(await read(messages, context, fail), context)

        await guard(context, answer)

    return call


def _writing(generate: Callable[[Any, Context], AsyncIterator[Any]]) -> Callable[[Any, Context], Awaitable[None]]:
    """An async generator as a coroutine that writes."""

    async def call(request: Any, context: Context) -> None:
        async for message in generate(request, context):
            await context.write(message)

    return call


async def _guard(ending: _Ending, context: Context, answer: Respond) -> Any:
    fail = partial(_fail, ending, context, time.monotonic())
    try:
        metadata.set_holder(context)
        metadata.name_call(ending.replica_id)
        response = await answer(fail)
        context.set_trailing_metadata((ending.replica, *ending.trailers()))
        return response
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    except grpc.aio.BaseError:
        # Ended by an `abort` already.
        raise
    except Exception as error:
        await fail(error)


async def _fail(ending: _Ending, context: Context, started_s: float, error: Exception) -> None:
    status = call_status(error, metadata.request_id())
    duration_s, is_request = time.monotonic() - started_s, metadata.is_request()
    ending.failures.report(error, status, ending.method, duration_s, is_request=is_request)
    # The frames it went through may hold megabytes of a message, and `abort` raises what refers in a circle to itself
    # and to this.
    error.__traceback__ = error.__context__ = None
    # `abort` drops trailers that were set before.
    load = () if isinstance(error, NotAllowed) else ending.trailers()
    await _end(context, status, (*status.trailers, ending.replica, *load))


async def _end(context: Context, status: CallStatus, trailers: Trailers) -> None:
    try:
        await context.abort(status.code, status.text, trailers)
    except grpc.aio.InternalError:
        # The call is over for its client (deadline, cancel). gRPC takes that for a crash of ours and prints a page,
        # unless it sees this.
        raise asyncio.CancelledError from None


def _serializer(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Bytes are messages that their method has written itself."""
    return lambda message: message if type(message) is bytes else serialize(message)


def _parser(deserializer: Callable[[bytes], Any] | None) -> Parse:
    return deserializer if deserializer is not None else lambda message: message
