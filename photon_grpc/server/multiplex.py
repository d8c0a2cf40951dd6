"""One MultiplexGenerate call: actions in; frames out, each with everything pending when the previous one was written.

A request is known by its id until its end has been sent; every item carries its handle. The failure of one request is
an item. Only the end of the call (cancel, deadline, lost connection, drain) ends all requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import grpc

from photon_grpc.core.admission import MAX_REQUEST_ID_CHARS, check_request_id
from photon_grpc.errors import Cancelled, Draining, DuplicateRequestId, InternalFailure, InvalidRequest, PhotonError
from photon_grpc.frontend.output.update import Update
from photon_grpc.frontend.stream import TokenStream
from photon_grpc.server.calls.call import CallFailures, current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.calls.methods import MULTIPLEX
from photon_grpc.server.calls.receiver import Messages
from photon_grpc.server.calls.status import call_status, request_error
from photon_grpc.server.heartbeats import NO_HEARTBEATS, NoHeartbeats, heartbeats_of
from photon_grpc.server.typed.message_type import MessageType
from photon_grpc.server.wire.fields import first_request_id
from photon_grpc.server.wire.frames import ItemWriter
from photon_grpc.server.wire.writer import StreamWriter
from photon_grpc.v1 import inference_pb2 as pb

#: Requests with unsent updates. Above this no action is read, so that errors cannot pile up for a reader that reads
#: nothing.
MAX_UNSENT = 1024
#: A frame ends with the item that exceeds this size. Clients accept 4 MiB by default.
MAX_FRAME_BYTES = 1 << 20
#: A write that takes longer counts as idle, since it waits for its reader.
_STALLED_S = 10.0


class Admitted(NamedTuple):
    """A request that the front end has accepted."""

    stream: TokenStream
    #: Set for typed output.
    message_type: MessageType | None = None


Admit = Callable[[pb.GenerateRequest], Awaitable[Admitted]]
#: Records the refusal of a request, by its id, that is not passed to Admit.
Refuse = Callable[[str, PhotonError], None]


class _Member:
    """One request of the call, from its action to its end."""

    __slots__ = (
        *("_call", "admission", "error", "heartbeats", "is_ready", "is_request", "items", "request_id"),
        *("started_s", "stream"),
    )

    def __init__(self, call: MultiplexCall, handle: int, request_id: str) -> None:
        #: Cut to the valid length, since it is sent and logged.
        self.request_id = request_id[:MAX_REQUEST_ID_CHARS]
        self.items = ItemWriter(handle, self.request_id)
        self.started_s = time.monotonic()
        #: Prepares the request and sends it to the engine.
        self.admission: asyncio.Task[None] | None = None
        self.stream: TokenStream | None = None
        self.error: Exception | None = None
        self.heartbeats: NoHeartbeats = NO_HEARTBEATS
        #: It is in the list of members with updates.
        self.is_ready = False
        #: It came from a valid action, so observers of requests see its end.
        self.is_request = False
        self._call = call

    def due(self) -> None:
        """Mark the request as having an update to send."""
        if not self.is_ready:
            self.is_ready = True
            self._call.add_ready(self)

    def stop(self) -> None:
        """Abort what still runs of the request."""
        self.heartbeats.stop()
        if self.admission is not None:
            self.admission.cancel()
        if self.stream is not None:
            self.stream.close()


class MultiplexCall:
    """One call. It reads in its own task, beside the call's task, which writes."""

    def __init__(self, admit: Admit, refuse: Refuse, failures: CallFailures) -> None:
        self._admit = admit
        self._refuse = refuse
        self._failures = failures
        self._num_handles = 0
        #: Id -> a request whose end has not been sent yet.
        self._members: dict[str, _Member] = {}
        #: Requests with updates, in order of arrival.
        self._ready: list[_Member] = []
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._is_half_closed = False
        self._is_draining = False
        self._over = asyncio.Event()
        #: Time of the newest action or frame.
        self._active_s = time.monotonic()
        #: A frame is being built or written.
        self._is_writing = False
        self._eviction: PhotonError | None = None
        #: The task that writes.
        self._task: asyncio.Task[None] | None = None
        self._defect: Exception | None = None

    # The rest runs in the task that writes.

    async def answer(self, context: Context, writer: StreamWriter) -> None:
        """Write until all has ended. Raise Draining, DeadlinePassed, IdleStreamEvicted."""
        self._task = asyncio.current_task()
        try:
            await self._write_frames(context, writer)
        except asyncio.CancelledError:
            if self._eviction is None or self._task is None or self._task.uncancel():
                raise
            raise self._eviction from None

    async def _write_frames(self, context: Context, writer: StreamWriter) -> None:
        has_written = False
        while await self._wait():
            self._active_s, self._is_writing = time.monotonic(), True
            frame = await self._frame()
            if not frame:
                continue
            if not has_written:
                await current().send_initial_metadata(context)
                has_written = True
            await writer.write(context, frame)

    def idle_since_s(self) -> float | None:
        """Return since when it is idle; None with requests or updates. A stalled reader counts as idle."""
        if self._members or self._ready:
            return None
        is_writing = self._is_writing and time.monotonic() - self._active_s < _STALLED_S
        return None if is_writing else self._active_s

    def evict(self, error: PhotonError) -> None:
        self._eviction = error
        self._over.set()  # clients resend later actions on another call
        if self._task is not None:
            self._task.cancel()

    def drain(self) -> None:
        """End the call with Draining once nothing runs."""
        self._is_draining = True
        self._news.set()

    def close(self) -> None:
        """Abort what still runs, and read no more actions."""
        self._over.set()
        self._room.set()
        for member in self._members.values():
            member.stop()
        self._members.clear()

    def add_ready(self, member: _Member) -> None:
        self._ready.append(member)
        self._news.set()

    async def _wait(self) -> bool:
        """Wait for updates; return False at the end of the call."""
        self._is_writing = False
        while not self._ready:
            if self._defect is not None:
                raise self._defect
            if not self._members:
                if self._is_half_closed:
                    return False
                if self._is_draining:
                    raise Draining()
            self._news.clear()
            await self._news.wait()
        return True

    async def _frame(self) -> bytes:
        """Return the pending updates that fit, as a MultiplexGenerateResponse in wire form."""
        ready, self._ready = self._ready, []
        items: list[bytes] = []
        num_bytes = 0
        for number, member in enumerate(ready):
            if num_bytes > MAX_FRAME_BYTES:
                self._ready = ready[number:] + self._ready
                break
            member.is_ready = False
            item = await self._item(member)
            items.append(item)
            num_bytes += len(item)
        if len(self._ready) < MAX_UNSENT:
            self._room.set()
        return b"".join(items)

    async def _item(self, member: _Member) -> bytes:
        """Encode the pending update; b"" if there is none."""
        stream, items = member.stream, member.items
        update = self._take(member, stream) if stream is not None and member.error is None else None
        if update is None or stream is None:
            return self._item_without_update(member)
        item = items.plain(update)
        if item is not None:
            return item
        member.heartbeats.stop()
        try:
            return await items.full(update, stream.start)
        except InternalFailure as error:  # a message that cannot be made
            stream.close(error)
            self._end(member, error)
            return items.error(request_error(error, member.request_id))

    def _item_without_update(self, member: _Member) -> bytes:
        if member.error is not None:
            return member.items.error(request_error(member.error, member.request_id))
        if not member.heartbeats.is_due:
            return b""
        member.heartbeats.restart()
        return member.items.heartbeat()

    def _take(self, member: _Member, stream: TokenStream) -> Update | None:
        """Return the pending update. Forget a request that has ended, and wait for the next update of others."""
        try:
            update = stream.take()
        except Exception as error:
            self._end(member, error)
            return None
        if update is not None and update.timing is not None:
            del self._members[member.request_id]
        else:
            stream.call_when_due(member.due)
        return update

    # The rest runs in the task that reads.

    async def read(self, messages: Messages) -> None:
        """Read actions until the client half-closes or the call is over. Never cancel this: gRPC's reads forbid it."""
        try:
            while not self._over.is_set():
                try:
                    action = await anext(messages)
                    if self._over.is_set():  # meanwhile
                        break
                    self._act(action)
                    del action  # it may hold megabytes until the next one
                except StopAsyncIteration:
                    break
                except PhotonError as error:
                    self._fail(self._member(first_request_id(messages.beginning)), error)
                while len(self._ready) >= MAX_UNSENT and not self._over.is_set():
                    self._room.clear()
                    await self._room.wait()
        except grpc.aio.BaseError:  # the call is over
            pass
        except Exception as error:
            self._defect = error
        self._is_half_closed = True
        self._news.set()

    def _act(self, action: pb.MultiplexGenerateRequest) -> None:
        """Perform an action. Raise InvalidRequest."""
        self._active_s = time.monotonic()
        match action.WhichOneof("action"):
            case "generate":
                self._generate(action.generate)
            case "cancel":
                self._cancel(action.cancel.request_id)
            case _:
                raise InvalidRequest("action: it holds neither generate nor cancel", field="action")

    def _generate(self, request: pb.GenerateRequest) -> None:
        member = self._member(request.request_id)
        member.is_request = True
        try:
            self._check_id(request.request_id)
        except PhotonError as error:
            self._refuse(member.request_id, error)
            self._fail(member, error)
        else:
            self._members[member.request_id] = member
            member.admission = asyncio.create_task(self._start(member, request))
            member.heartbeats = heartbeats_of(request, member.due)

    def _check_id(self, request_id: str) -> None:
        """Raise InvalidRequest, DuplicateRequestId."""
        if not request_id:
            raise InvalidRequest("request_id: a request of MultiplexGenerate must have one", field="request_id")
        check_request_id(request_id, "request_id")
        if request_id in self._members:
            text = "request_id: a request of this stream with this id is in flight"
            raise DuplicateRequestId(text, field="request_id")

    def _cancel(self, request_id: str) -> None:
        member = self._members.get(request_id)
        if member is None or (member.stream is not None and not member.stream.num_running):
            return  # its end has been sent or is about to be
        member.stop()
        self._fail(member, Cancelled("cancelled by its caller"))

    def _member(self, request_id: str) -> _Member:
        self._num_handles += 1
        return _Member(self, self._num_handles, request_id)

    async def _start(self, member: _Member, request: pb.GenerateRequest) -> None:
        admission = self._admit(request)
        del request  # it may hold megabytes
        try:
            member.stream, member.items.responses.message_type = await admission
        except Exception as error:
            self._fail(member, error)
        else:
            member.stream.call_when_due(member.due)

    def _fail(self, member: _Member, error: Exception) -> None:
        self._end(member, error)
        member.due()

    def _end(self, member: _Member, error: Exception) -> None:
        if self._members.get(member.request_id) is member:
            del self._members[member.request_id]
        member.heartbeats.stop()
        member.error = error
        if not isinstance(error, Cancelled):
            status = call_status(error, member.request_id)
            duration_s = time.monotonic() - member.started_s
            self._failures.report(error, status, MULTIPLEX, duration_s, is_request=member.is_request)
        error.__traceback__ = error.__context__ = None  # the frames may hold megabytes of a message
