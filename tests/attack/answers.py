"""What calls come back with, and whether the contract knows it. Bytes in, bytes out: no message class stands between an
attack and the server."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from tests.server.test_status import TABLE

DOMAIN = "photon-grpc"
#: A call that takes longer than that is one that nobody answers. Generous: the machine may be busy with other things.
ANSWER_LIMIT_S = 90.0
#: A stream whose first message came is answered; what it still says is read while messages come no further apart than
#: this.
_STREAM_PAUSE_S = 0.3
_MAX_DETAILS_BYTES = 4096
_IN_FLIGHT = 16
#: What our own client says where the server ended a call before all messages were sent; the server's status is lost
#: then.
UNSENT = "UNSENT"
_UNSENT_TEXT = "Internal error from Core"
#: A caller may meet each of these, except that the server itself fails.
_CONTRACT = {(code.name, reason) for _, code, reason in TABLE if code is not grpc.StatusCode.INTERNAL}


@dataclass(frozen=True, slots=True)
class Answer:
    """How one call ended. `messages` came before."""

    code: str
    reason: str = ""
    domain: str = ""
    text: str = ""
    #: google.rpc.Status, as text.
    details: str = ""
    details_bytes: int = 0
    messages: tuple[bytes, ...] = ()
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return self.reason or self.code

    @property
    def is_of_the_contract(self) -> bool:
        """OK, or a code with a reason that belongs to it, told by us and short."""
        if self.code == "OK":
            return True
        is_small = self.details_bytes <= _MAX_DETAILS_BYTES
        return (self.code, self.reason) in _CONTRACT and self.domain == DOMAIN and is_small

    def __str__(self) -> str:
        return f"{self.code} {self.reason} after {self.seconds:.2f} s: {self.text[:160]}"


async def answer(call: Any) -> Answer:
    """Of a grpc.aio call of any shape. Streams are read as long as they speak, then cancelled."""
    started_s = time.monotonic()
    messages: list[bytes] = []
    try:
        if hasattr(call, "read"):
            await _read(call, messages)
        else:
            messages.append(await call)
    except grpc.aio.AioRpcError as error:
        return _failed(error, tuple(messages), time.monotonic() - started_s)
    return Answer("OK", messages=tuple(messages), seconds=time.monotonic() - started_s)


async def _read(call: Any, messages: list[bytes]) -> None:
    pause_s: float | None = None
    try:
        while True:
            async with asyncio.timeout(pause_s):
                message = await call.read()
            if message is grpc.aio.EOF:
                break
            messages.append(message)
            pause_s = _STREAM_PAUSE_S
    except TimeoutError:
        call.cancel()
        return
    if await call.code() is not grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )


def _failed(error: grpc.aio.AioRpcError, messages: tuple[bytes, ...], seconds: float) -> Answer:
    if error.details() == _UNSENT_TEXT:
        return Answer(UNSENT, messages=messages, seconds=seconds)
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    status = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    known = any(detail.Unpack(info) for detail in status.details)
    return Answer(
        error.code().name,
        info.reason if known else "",
        info.domain if known else "",
        error.details() or "",
        str(status),
        len(details),
        messages,
        seconds,
    )


async def answers(calls: Iterable[Callable[[], Any]], in_flight: int = _IN_FLIGHT) -> list[Answer]:
    """Of calls that are started as others end, in their order."""
    room = asyncio.Semaphore(in_flight)

    async def one(start: Callable[[], Any]) -> Answer:
        async with room:
            return await answer(start())

    return await together(one(call) for call in calls)


async def together(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """Their results. One that fails ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]  # type: ignore[arg-type]
    return [task.result() for task in tasks]


def raw_call(channel: grpc.aio.Channel, path: str, messages: Sequence[bytes], *, to_stream: bool, **more: Any) -> Any:
    """A call of the method at `path` with exactly these bytes as its messages, however many the method expects."""
    more.setdefault("timeout", ANSWER_LIMIT_S)
    if len(messages) == 1:
        make = channel.unary_stream if to_stream else channel.unary_unary
        return make(path)(messages[0], **more)
    make = channel.stream_stream if to_stream else channel.stream_unary
    return make(path)(_each(messages), **more)


async def _each(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def tally(found: Iterable[Answer]) -> Counter[str]:
    return Counter(answer.outcome for answer in found)


def strangers(found: Iterable[Answer], *also: str) -> list[str]:
    """What the contract does not know; `also` are outcomes that this attack is answered with by gRPC itself."""
    return [str(answer) for answer in found if not answer.is_of_the_contract and answer.outcome not in also]
