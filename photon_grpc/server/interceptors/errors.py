"""Outermost: names the call, parses its messages, and ends every failed call with one `abort` that carries details and trailers.

Parsing happens here because grpc.aio deserialises before any handler runs and answers UNKNOWN for bytes that are no message.
Nothing that a caller wrote is logged, and no text of an unforeseen exception leaves the process: it may quote a prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from photon_grpc.errors import MalformedMessage
from photon_grpc.server import metadata
from photon_grpc.server.interceptors.failure_log import FailureLog
from photon_grpc.server.metadata import Context
from photon_grpc.server.status import CallStatus, call_status

MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Parse = Callable[[bytes], Any]
#: Awaits a call, and ends it where it fails.
Guard = Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of every service, whatever its shape."""

    def __init__(self) -> None:
        self._failures = FailureLog()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler, handler_call_details.method, self._failures)


def _guarded(handler: Any, method: str, failures: FailureLog) -> MethodHandler:
    parse = _parser(handler.request_deserializer)
    guard = partial(_guard, method, failures)
    if handler.response_streaming:
        wrapped = _responding_stream(handler, guard, parse)
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
    else:
        wrapped = _responding_once(handler, guard, parse)
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
    return make(wrapped, request_deserializer=None, response_serializer=handler.response_serializer)


def _responding_once(handler: Any, guard: Guard, parse: Parse) -> Callable[[Any, Context], Awaitable[Any]]:
    behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
    read = _parsed_stream if handler.request_streaming else _parsed

    async def call(request: Any, context: Context) -> Any:
        return await guard(context, lambda: behavior(read(request, parse), context))

    return call


def _responding_stream(handler: Any, guard: Guard, parse: Parse) -> Callable[[Any, Context], Awaitable[None]]:
    behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
    read = _parsed_stream if handler.request_streaming else _parsed
    writes = behavior if inspect.iscoroutinefunction(behavior) else _writing(behavior)

    async def call(request: Any, context: Context) -> None:
        await guard(context, lambda: writes(read(request, parse), context))

    return call


def _writing(generate: Callable[[Any, Context], AsyncIterator[Any]]) -> Callable[[Any, Context], Awaitable[None]]:
    """An async generator as a coroutine that writes."""

    async def call(request: Any, context: Context) -> None:
        async for message in generate(request, context):
            await context.write(message)

    return call


async def _guard(method: str, failures: FailureLog, context: Context, call: Callable[[], Awaitable[Any]]) -> Any:
    started_s = time.monotonic()
    try:
        metadata.name_call(context)
        return await call()
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    except grpc.aio.BaseError:
        # Ended by an `abort` already.
        raise
    except Exception as error:
        status = call_status(error, metadata.request_id())
        failures.report(error, status, method, time.monotonic() - started_s)
        await _end(context, status)


async def _end(context: Context, status: CallStatus) -> None:
    try:
        await context.abort(status.code, status.text, status.trailers)
    except grpc.aio.InternalError:
        # The call is over for its client (deadline, cancel). gRPC takes that for a crash of ours and prints a page, unless it sees this.
        raise asyncio.CancelledError from None


def _parser(deserializer: Callable[[bytes], Any] | None) -> Parse:
    return deserializer if deserializer is not None else lambda message: message


def _parsed(message: bytes, parse: Parse) -> Any:
    try:
        return parse(message)
    except DecodeError:
        raise MalformedMessage("the bytes are no message of this method, or a string in them is no UTF-8") from None


async def _parsed_stream(messages: AsyncIterator[bytes], parse: Parse) -> AsyncIterator[Any]:
    async for message in messages:
        yield _parsed(message, parse)
