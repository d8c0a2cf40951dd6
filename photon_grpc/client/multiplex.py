"""Many requests over one MultiplexGenerate call."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack

import grpc.aio

from photon_grpc.client.answer_types import answer_types
from photon_grpc.client.descriptor_sets import ALL_IN_REQUESTS, AllInRequests
from photon_grpc.client.generation import Generation, read_generation
from photon_grpc.client.joined_outputs import joined_outputs
from photon_grpc.client.newer_fields import NewerFields
from photon_grpc.client.options import build_request
from photon_grpc.client.resume import ResumingCall
from photon_grpc.client.retry_policy import RetryPolicy
from photon_grpc.client.status import Unreachable, item_error, to_error
from photon_grpc.client.stream import MessageCall, Stream
from photon_grpc.core.fields import Options
from photon_grpc.core.generation import Prompt
from photon_grpc.errors import DeadlinePassed, Draining, DuplicateRequestId, InvalidRequest, PhotonError
from photon_grpc.v1 import inference_pb2 as pb

MultiplexGenerateCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse]"
)

#: Sends only the first and the last message of a stream.
_AT_THE_END = 2**32 - 1


class MultiplexedCall:
    """One request of a multiplexed stream, read like a StreamGenerate call."""

    def __init__(self, cancel: Callable[[str], None], request_id: str, timeout_s: float) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._messages: deque[pb.StreamGenerateResponse] = deque()
        self._error: PhotonError | None = None
        self._is_over = False
        self._changed = asyncio.Event()
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._expire, timeout_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.StreamGenerateResponse:
        message = await self.read()
        if not isinstance(message, pb.StreamGenerateResponse):
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """Return the next message, EOF after the last. Raise PhotonError."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return grpc.aio.EOF
            self._changed.clear()
            await self._changed.wait()
        return self._messages.popleft()

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        if not self._is_over:
            self._cancel(self.request_id)

    def add(self, message: pb.StreamGenerateResponse) -> None:
        self._messages.append(message)
        self._changed.set()

    def end(self, error: PhotonError | None) -> None:
        """End the call, after the messages that were added."""
        if self._is_over:
            return
        self._is_over = True
        self._error = error
        self._deadline.cancel()
        self._changed.set()

    def _expire(self, timeout_s: float) -> None:
        self.cancel()
        self.end(DeadlinePassed(f"{timeout_s:g} s have passed"))


class Multiplex:
    """Requests that share a stream: `async with client.multiplex() as many`. Leaving the block ends what still runs.

    The failure of one request does not affect the others. When the stream is lost or its server drains, the next
    request opens another, where streams of one output continue; other requests in flight fail with the reason. A server
    may end an idle stream to use its place; the next request opens another, and a request on its way is resent there.
    """

    def __init__(
        self,
        open_call: Callable[[], MultiplexGenerateCall],
        target: str,
        policy: RetryPolicy,
        newer_fields: NewerFields,
        sets: AllInRequests = ALL_IN_REQUESTS,
    ) -> None:
        """Take the call to open, and the retry policy and the check for single requests.

        gRPC itself retries only whole streams.
        """
        self._sets = sets
        self._open_call = open_call
        self._target = target
        self._policy = policy
        self._newer_fields = newer_fields
        self._wires: list[_MultiplexStream] = []
        self._is_closed = False

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """See Client.stream."""
        request = build_request(prompt, options)
        timeout_s = self._policy.timeout_of(options.get("timeout"))
        call = self._newer_fields.opened(request, partial(self._call, request, options), timeout_s)
        return Stream(call, self._target, answer_types(options))

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """See Client.generate."""
        request = build_request(prompt, options)
        left_s = await self._newer_fields.check(request, self._policy.timeout_of(options.get("timeout")))
        request.stream.max_tokens_per_message = _AT_THE_END
        call = self._call(request, options, left_s)
        messages: list[pb.StreamGenerateResponse] = []
        try:
            while isinstance(message := await call.read(), pb.StreamGenerateResponse):
                messages.append(message)
        finally:
            call.cancel()
        num_starts = sum(message.HasField("start") for message in messages)
        return replace(read_generation(_gathered(messages), answer_types(options)), is_bit_exact=num_starts <= 1)

    def ask(self, request: pb.GenerateRequest, timeout_s: float) -> MultiplexedCall:
        """Send a request once, with an id if it has none, and return its call. Raise DuplicateRequestId."""
        if self._is_closed:
            raise Unreachable("the stream was closed")
        return self._wire().ask(request, timeout_s)

    def _wire(self) -> _MultiplexStream:
        """Return the wire for new requests."""
        self._wires = [wire for wire in self._wires if not wire.is_over]
        if not self._wires or self._wires[-1].is_leaving:
            self._wires.append(_MultiplexStream(self._open_call(), self._target))
        return self._wires[-1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed = True
        for wire in self._wires:
            await wire.close()

    def _call(self, request: pb.GenerateRequest, options: Options, timeout_s: float) -> MessageCall:
        open_call = self._sets.detach(request, options.get("message_type")).opener(self.ask)
        open_call = self._newer_fields.opener(request, open_call)
        return ResumingCall(request, open_call, self._target, timeout_s, self._policy)


#: Servers send at most this much of an id, by which an answer finds its request.
_MAX_ID_CHARS = 128


class _MultiplexStream:
    """One MultiplexGenerate call."""

    def __init__(self, call: MultiplexGenerateCall, target: str) -> None:
        self._call = call
        self._target = target
        #: Requests in flight.
        self._by_id: dict[str, MultiplexedCall] = {}
        self._by_handle: dict[int, MultiplexedCall] = {}
        self._actions: asyncio.Queue[pb.MultiplexGenerateRequest] = asyncio.Queue()
        self._tasks = (asyncio.create_task(self._write()), asyncio.create_task(self._read()))
        #: `is_leaving`: no new request may be sent. `is_over`: none is in flight either.
        self.is_leaving = False
        self.is_over = False

    def ask(self, request: pb.GenerateRequest, timeout_s: float) -> MultiplexedCall:
        request_id = request.request_id = request.request_id or uuid.uuid4().hex
        if len(request_id) > _MAX_ID_CHARS:
            text = f"request_id has {len(request_id)} characters; the limit is {_MAX_ID_CHARS}"
            raise InvalidRequest(text, field="request_id", needed=len(request_id), limit=_MAX_ID_CHARS)
        if request_id in self._by_id:
            raise DuplicateRequestId(f"{request_id!r} is in flight on this stream", field="request_id")
        # The server enforces this deadline; the call has its own, in case the server is silent.
        _set_timeout(request, timeout_s)
        call = self._by_id[request_id] = MultiplexedCall(self.cancel, request_id, timeout_s)
        self._actions.put_nowait(pb.MultiplexGenerateRequest(generate=request))
        return call

    def cancel(self, request_id: str) -> None:
        action = pb.MultiplexGenerateRequest.Cancel(request_id=request_id)
        self._actions.put_nowait(pb.MultiplexGenerateRequest(cancel=action))

    async def close(self) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(Unreachable("the stream was closed"))

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._actions.get())

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                for item in frame.items:
                    self._deliver(item)
        except grpc.aio.AioRpcError as failure:
            self._fail(self._error(failure))
        else:
            self._fail(Unreachable(f"{self._target} has ended the stream"))

    def _error(self, failure: grpc.aio.AioRpcError) -> PhotonError:
        if failure.code() is not grpc.StatusCode.INTERNAL or failure.trailing_metadata():
            return to_error(failure, self._target)
        # grpc.aio raises this if a message is written after the stream's end, and drops the stream's status.
        error = Unreachable(f"{self._target} has ended the stream")
        error.was_lost, error.target, error.is_left_to_caller = True, self._target, True
        return error

    def _deliver(self, item: pb.MultiplexItem) -> None:
        call = self._by_handle.get(item.handle)
        if call is None:
            call = self._by_id.get(item.request_id)
            if call is None:
                return
            self._by_handle[item.handle] = call
        error = item_error(item.error, self._target) if item.HasField("error") else None
        if isinstance(error, Draining):
            self.is_leaving = True
        if item.HasField("response"):
            call.add(item.response)
        if error is not None or item.response.HasField("timing"):
            del self._by_handle[item.handle], self._by_id[call.request_id]
            call.end(error)

    def _fail(self, error: PhotonError) -> None:
        self.is_leaving = self.is_over = True
        calls = tuple(self._by_id.values())
        self._by_id.clear()
        self._by_handle.clear()
        self._tasks[0].cancel()
        for call in calls:
            call.end(error)


def _set_timeout(request: pb.GenerateRequest, timeout_s: float) -> None:
    request.scheduling.timeout.FromNanoseconds(round(timeout_s * 1e9))


def _gathered(messages: list[pb.StreamGenerateResponse]) -> pb.GenerateResponse:
    """Merge the messages of a stream into one response."""
    start = next((message.start for message in messages if message.HasField("start")), pb.GenerationStart())
    last = messages[-1]
    return pb.GenerateResponse(
        request_id=start.request_id,
        model=start.model,
        outputs=joined_outputs(delta for message in messages for delta in message.deltas),
        usage=last.usage,
        timing=last.timing,
        prompt=start.prompt if start.HasField("prompt") else None,
        seed=start.seed,
        create_time=start.create_time if start.HasField("create_time") else None,
        release=start.release,
        numerics_version=start.numerics_version,
    )
