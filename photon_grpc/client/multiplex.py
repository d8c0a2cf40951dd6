"""Many requests over one MultiplexGenerate call."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio

from photon_grpc.client.generation import Generation, read_generation
from photon_grpc.client.options import Options, build_request
from photon_grpc.client.status import Unreachable, item_error, to_error
from photon_grpc.client.stream import Stream
from photon_grpc.core.generation import Prompt
from photon_grpc.errors import DuplicateRequestId, PhotonError
from photon_grpc.v1 import inference_pb2 as pb

#: No message but the first and the last.
_AT_THE_END = 2**32 - 1


class MultiplexedCall:
    """One request of many, read like a StreamGenerate call."""

    def __init__(self, multiplex: Multiplex, request_id: str) -> None:
        self.request_id = request_id
        self._multiplex = multiplex
        self._messages: deque[pb.StreamGenerateResponse] = deque()
        self._error: PhotonError | None = None
        self._is_over = False
        self._news = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.StreamGenerateResponse:
        message = await self.read()
        if not isinstance(message, pb.StreamGenerateResponse):
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """The next message, EOF after the last. Raise PhotonError."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return grpc.aio.EOF
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()

    def cancel(self) -> None:
        """End the request; do nothing once it has ended."""
        if not self._is_over:
            self._multiplex.cancel(self.request_id)

    def tell(self, message: pb.StreamGenerateResponse) -> None:
        self._messages.append(message)
        self._news.set()

    def end(self, error: PhotonError | None) -> None:
        """After what was told."""
        self._is_over = True
        self._error = error
        self._news.set()


class Multiplex:
    """Requests that share a stream: `async with client.multiplex() as many`. Leaving the block ends what still runs.

    One that fails harms no other; a stream that is lost fails all of them, with the reason.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[pb.MultiplexGenerateRequest, pb.MultiplexGenerateResponse],
        target: str,
    ) -> None:
        self._call = call
        self._target = target
        #: Those in flight.
        self._by_id: dict[str, MultiplexedCall] = {}
        self._by_handle: dict[int, MultiplexedCall] = {}
        self._actions: asyncio.Queue[pb.MultiplexGenerateRequest] = asyncio.Queue()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        #: Why the stream is over.
        self._error: PhotonError | None = None

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """See Client.stream. `timeout` is kept by the server alone."""
        return Stream(self.ask(build_request(prompt, options)), self._target, options.get("message_type"))

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """See Client.generate."""
        request = build_request(prompt, options)
        request.stream.max_tokens_per_message = _AT_THE_END
        call = self.ask(request)
        try:
            whole = _gathered([message async for message in call])
            return read_generation(whole, options.get("message_type"))
        finally:
            call.cancel()

    def ask(self, request: pb.GenerateRequest) -> MultiplexedCall:
        """The call of a request, which gets an id where it has none. Raise DuplicateRequestId."""
        request_id = request.request_id = request.request_id or uuid.uuid4().hex
        if request_id in self._by_id:
            raise DuplicateRequestId(f"{request_id!r} is in flight on this stream", field="request_id")
        call = MultiplexedCall(self, request_id)
        if self._error is None:
            self._by_id[request_id] = call
            self._actions.put_nowait(pb.MultiplexGenerateRequest(generate=request))
        else:
            call.end(self._error)
        return call

    def cancel(self, request_id: str) -> None:
        action = pb.MultiplexGenerateRequest.Cancel(request_id=request_id)
        self._actions.put_nowait(pb.MultiplexGenerateRequest(cancel=action))

    async def __aenter__(self) -> Self:
        self._tasks = (asyncio.create_task(self._write()), asyncio.create_task(self._read()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
                    self._tell(item)
        except grpc.aio.AioRpcError as failure:
            self._fail(to_error(failure, self._target))
        else:
            self._fail(Unreachable(f"{self._target} has ended the stream"))

    def _tell(self, item: pb.MultiplexItem) -> None:
        call = self._by_handle.get(item.handle)
        if call is None:
            call = self._by_id.get(item.request_id)
            if call is None:
                return
            self._by_handle[item.handle] = call
        error = item_error(item.error, self._target) if item.HasField("error") else None
        if error is None:
            call.tell(item.response)
        if error is not None or item.response.HasField("timing"):
            del self._by_handle[item.handle], self._by_id[call.request_id]
            call.end(error)

    def _fail(self, error: PhotonError) -> None:
        self._error = error
        for call in self._by_id.values():
            call.end(error)
        self._by_id.clear()
        self._by_handle.clear()


def _gathered(messages: list[pb.StreamGenerateResponse]) -> pb.GenerateResponse:
    """All that a stream said, as one."""
    start, last = messages[0].start, messages[-1]
    outputs: dict[int, pb.Output] = {}
    for message in messages:
        for delta in message.deltas:
            whole = outputs.setdefault(delta.index, pb.Output())
            text, reasoning, content = (
                whole.text + delta.text,
                whole.reasoning + delta.reasoning,
                whole.content + delta.content,
            )
            whole.MergeFrom(delta)
            whole.text, whole.reasoning, whole.content = text, reasoning, content
    return pb.GenerateResponse(
        request_id=start.request_id,
        model=start.model,
        outputs=[outputs[index] for index in sorted(outputs)],
        usage=last.usage,
        timing=last.timing,
        prompt=start.prompt if start.HasField("prompt") else None,
        seed=start.seed,
    )
