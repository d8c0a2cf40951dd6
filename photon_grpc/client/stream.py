"""The stream of one StreamGenerate call."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio

from photon_grpc.client.answer_types import AnswerTypes
from photon_grpc.client.generation import NO_TYPES, Delta, read_delta, read_start, read_timing, read_usage
from photon_grpc.client.status import to_error
from photon_grpc.core.generation import Start, Timing, Usage
from photon_grpc.v1 import inference_pb2 as pb


class MessageCall(Protocol):
    """The source of a Stream: a StreamGenerate call, or one of a multiplexed stream."""

    async def read(self) -> Any:
        """Return the next message, EOF after the last. Raise AioRpcError, PhotonError."""

    def cancel(self) -> Any: ...


class Stream:
    """An async iterator of Delta that ends when every output has finished.

    `start` is set with the first delta, `usage` and `timing` at the end. To leave early, call `cancel()`, use `async
    with` or drop the object; each frees the request's resources on the server at its next step. Raises PhotonError;
    output received before remains valid. `is_bit_exact` becomes False when a server continues it that may compute other
    bits than the first (docs/numerics.md).
    """

    def __init__(self, call: MessageCall, target: str, types: AnswerTypes = NO_TYPES) -> None:
        self._call = call
        self._target = target
        self._types = types
        #: Index -> text so far, kept only to make objects.
        self._texts: defaultdict[int, str] = defaultdict(str)
        self._ready: deque[Delta] = deque()
        self.start: Start | None = None
        self.usage: Usage | None = None
        self.timing: Timing | None = None
        self.is_bit_exact = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._ready:
            await self._receive()
        return self._ready.popleft()

    async def next_deltas(self) -> list[Delta]:
        """Return the deltas of the next message; [] at the end."""
        with contextlib.suppress(StopAsyncIteration):
            self._ready.appendleft(await anext(self))
        deltas = list(self._ready)
        self._ready.clear()
        return deltas

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        # `break` out of `async for` only drops the object, and the call would run to its end. Its loop may be closed by
        # now.
        with contextlib.suppress(Exception):
            self._call.cancel()

    async def _receive(self) -> None:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise to_error(failure, self._target) from failure
        if not isinstance(message, pb.StreamGenerateResponse):
            raise StopAsyncIteration
        if message.HasField("start"):
            self.is_bit_exact = self.start is None
            self.start = self.start or read_start(message.start)
        if message.HasField("usage"):
            self.usage = read_usage(message.usage)
        if message.HasField("timing"):
            self.timing = read_timing(message.timing)
        self._ready.extend(self._read_delta(delta) for delta in message.deltas)

    def _read_delta(self, message: pb.Output) -> Delta:
        if self._types.object_type is None:
            return read_delta(message, self._types)
        before = self._texts[message.index]
        self._texts[message.index] += message.text
        return read_delta(message, self._types, before)
