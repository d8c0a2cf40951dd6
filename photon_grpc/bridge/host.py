"""The engine's end of the bridge: one socket per front end, polled by the engine's loop, which other threads may wake.

It knows which outputs of a front end are alive, and nothing else about them. A front end that disconnects, sends
invalid data or stops reading is dropped, and the engine gets an Abort for its outputs.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence

from photon_grpc.bridge.codec import DOWN, FrameError, FrameReader, encode
from photon_grpc.bridge.control import ControlChannel, ControlMessage, Link, RequestsLost, Stop
from photon_grpc.bridge.wakeup import Wakeup
from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Abort, Add, Down, Facts, StepFrame, Up, Watch
from photon_grpc.core.ports import Event
from photon_grpc.core.stats import Load

log = logging.getLogger(__name__)

_READ = selectors.EVENT_READ
_READ_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE

#: The longest wait, since an idle engine has to send heartbeats.
_REST_S = 1.0


class Connection:
    """The connection to one front end, with its backlog and the handles that are alive."""

    def __init__(self, frontend: int, sock: socket.socket, *, max_frame_bytes: int) -> None:
        sock.setblocking(False)
        self.frontend = frontend
        self.socket = sock
        #: Handle -> the first handle of its request.
        self.alive: dict[int, int] = {}
        self.is_watching = False
        self.backlog: deque[memoryview] = deque()
        self.backlog_bytes = 0
        #: When the socket last took a byte, while there is a backlog.
        self.moved_s = 0.0
        self._reader = FrameReader(DOWN, max_bytes=max_frame_bytes)

    def receive(self) -> list[Down]:
        """Return the frames that came. Raise EOFError, OSError or FrameError when the connection is over."""
        try:
            count = self.socket.recv_into(self._reader.room())
        except BlockingIOError:
            return []
        if not count:
            raise EOFError
        frames = self._reader.advance(count)
        for frame in frames:
            if isinstance(frame, Add):
                handles = range(frame.handle, frame.handle + frame.request.num_outputs)
                self.alive.update(dict.fromkeys(handles, frame.handle))
            elif isinstance(frame, Abort):
                for handle in frame.handles:
                    self.alive.pop(handle, None)
            elif isinstance(frame, Watch):
                self.is_watching = frame.is_on
        return frames

    def queue(self, data: bytes) -> None:
        """Write what the socket takes; the rest goes into the backlog."""
        rest = memoryview(data)
        if not self.backlog:
            rest = rest[self._write(rest) :]
            self.moved_s = time.monotonic()
        if len(rest):
            self.backlog.append(rest)
            self.backlog_bytes += len(rest)

    def flush(self) -> None:
        """Write as much of the backlog as the socket takes."""
        while self.backlog:
            count = self._write(self.backlog[0])
            if count:
                self.moved_s = time.monotonic()
                self.backlog_bytes -= count
            if count < len(self.backlog[0]):
                self.backlog[0] = self.backlog[0][count:]
                return
            self.backlog.popleft()

    def _write(self, data: memoryview) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # It is gone. What it sent before, possibly an Abort for everything, is read first, then the end.
            return len(data)


class BridgeHost:
    """Inbox and Outbox of an engine process.

    A front end is numbered by its connection. After a restart it has a new number and may number its handles from the
    start.
    """

    def __init__(
        self,
        control: ControlChannel | None,
        *,
        max_frame_bytes: int,
        max_backlog_bytes: int = 64 * 1024 * 1024,
        max_stall_s: float = 20.0,
    ) -> None:
        self._control = control
        self._max_frame_bytes = max_frame_bytes
        self._max_backlog_bytes = max_backlog_bytes
        self._max_stall_s = max_stall_s
        self._facts: Facts | None = None
        self._load: Load | None = None
        self._connections: dict[int, Connection] = {}
        self._next_frontend = 0
        #: Frames on behalf of front ends that are gone.
        self._farewells: list[tuple[int, Down]] = []
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, _READ, self._wakeup)
        if control is not None:
            self._selector.register(control.fileno(), _READ, control)

    def connect(self, sock: socket.socket) -> int:
        """Add the socket to a new front end; return its number."""
        connection = Connection(self._next_frontend, sock, max_frame_bytes=self._max_frame_bytes)
        self._next_frontend += 1
        self._connections[connection.frontend] = connection
        self._selector.register(sock, _READ, connection)
        if self._facts is not None:
            self.send(connection.frontend, self._facts)
            if self._load is not None:
                self.send(connection.frontend, self._load)
        return connection.frontend

    def announce(self, facts: Facts) -> None:
        """Send the Facts of the ready engine to every front end, and to each that connects later."""
        self._facts = facts
        for frontend in tuple(self._connections):
            self.send(frontend, facts)

    def wake(self, event: Event) -> None:
        """Deliver an event, as in core.ports.Inbox."""
        self._wakeup.ring(event)

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down | Event]]:
        """Return what came, as in core.ports.Inbox. Raise EOFError on Stop, or when no front end is connected."""
        if self._farewells or self._is_deserted:
            timeout_s = 0.0
        events = self._selector.select(_REST_S if timeout_s is None else min(timeout_s, _REST_S))
        if not (events or self._farewells or self._is_deserted):
            return []
        frames: list[tuple[int, Down | Event]] = []
        for key, mask in events:
            if isinstance(key.data, Connection):
                self._serve(key.data, mask, frames)
            elif isinstance(key.data, Wakeup):
                frames += [(-1, event) for event in key.data.take()]
            else:
                self._read_control(key.data)
        if self._farewells:
            frames += self._farewells
            self._farewells.clear()
        if not frames and self._is_deserted:
            raise EOFError("no front end and no supervisor is left")
        return frames

    def broadcast(self, load: Load) -> None:
        """Send a Load to every front end, as in core.ports.Outbox."""
        self._load = load
        for frontend in tuple(self._connections):
            self.send(frontend, load)

    def send(self, frontend: int, frame: Up) -> None:
        """Send a frame, as in core.ports.Outbox; drop it if the front end is gone.

        A picture that would wait is dropped, too: the next one is newer.
        """
        connection = self._connections.get(frontend)
        if connection is None or (connection.backlog and isinstance(frame, EnginePicture)):
            return
        if isinstance(frame, StepFrame):
            for ended in frame.finished:
                connection.alive.pop(ended.handle, None)
            for failed in frame.failed:
                connection.alive.pop(failed.handle, None)
        connection.queue(encode(frame))
        if connection.backlog:
            self._watch_backlog(connection)

    def close(self) -> None:
        """Close every socket; front ends see the end of the stream."""
        for connection in tuple(self._connections.values()):
            self._disconnect(connection)
        self._wakeup.close()
        self._selector.close()

    def hang_up(self) -> None:
        """End the streams to all front ends, from any thread that ends this process.

        The system would close sockets only once the process's memory is released, a tenth of a second later.
        """
        for connection in tuple(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def obey(self, messages: Sequence[ControlMessage]) -> None:
        """Process messages of the supervisor. Raise EOFError on Stop."""
        for message in messages:
            if isinstance(message, Link) and self._control is not None:
                self.connect(self._control.take_socket())
            elif isinstance(message, Stop):
                raise EOFError("the supervisor sent Stop")

    @property
    def _is_deserted(self) -> bool:
        return self._control is None and not self._connections

    def _read_control(self, control: ControlChannel) -> None:
        try:
            messages = control.receive()
        except EOFError:
            self._selector.unregister(control.fileno())
            control.close()
            self._control = None
            return
        self.obey(messages)

    def _serve(self, connection: Connection, mask: int, frames: list[tuple[int, Down | Event]]) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
                if not connection.backlog:
                    self._selector.modify(connection.socket, _READ, connection)
            if mask & _READ:
                frames += [(connection.frontend, frame) for frame in connection.receive()]
        except (EOFError, ConnectionResetError):
            # A front end that is alive when it is dropped reports itself how its requests ended.
            self._report_lost(len(set(connection.alive.values())))
            self._drop(connection, "is gone")
        except (OSError, FrameError) as error:
            self._drop(connection, f"is broken ({error})")

    def _watch_backlog(self, connection: Connection) -> None:
        stalled_s = time.monotonic() - connection.moved_s
        if connection.backlog_bytes > self._max_backlog_bytes or stalled_s > self._max_stall_s:
            self._drop(connection, f"has read nothing for {stalled_s:.1f} s, {connection.backlog_bytes} bytes wait")
        else:
            self._selector.modify(connection.socket, _READ_WRITE, connection)

    def _drop(self, connection: Connection, why: str) -> None:
        """Disconnect a front end; the next `drain` aborts its outputs and ends its watch."""
        if connection.alive:
            log.warning("front end %d %s: %d outputs aborted", connection.frontend, why, len(connection.alive))
            self._farewells.append((connection.frontend, Abort(tuple(sorted(connection.alive)))))
        if connection.is_watching:
            self._farewells.append((connection.frontend, Watch(is_on=False)))
        self._disconnect(connection)

    def _report_lost(self, num_requests: int) -> None:
        if self._control is not None and num_requests:
            # A supervisor that is gone does not count.
            with contextlib.suppress(OSError, BufferError):
                self._control.send(RequestsLost(num_requests))

    def _disconnect(self, connection: Connection) -> None:
        del self._connections[connection.frontend]
        self._selector.unregister(connection.socket)
        connection.socket.close()
