"""Child processes: their start, their control sockets, the detection of their end, and their end with the parent.

Nothing here depends on what a child does. Start children from the main thread: the system ends a child when the
*thread* that started it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from photon_grpc.bridge.codec import FrameError
from photon_grpc.bridge.control import MAX_PAGE_BYTES, Begin, CannotStart, ControlChannel, ControlMessage
from photon_grpc.bridge.heartbeat import SharedHeartbeat, Watchdog, is_stopped
from photon_grpc.service.processes.signals import END_SIGNALS, IDLE_SIGNALS, WHERE_SIGNAL

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

#: Signals that do not end a child.
_IGNORED_SIGNALS = (*END_SIGNALS, *IDLE_SIGNALS)
#: Signals that a process raises by its own fault.
_FATAL_SIGNALS = {
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
}

#: Time for a hanging child to print the stacks of its threads.
_PRINT_STACKS_S = 0.2

#: Longest message from the supervisor: a page, its status and type.
_MAX_MESSAGE_BYTES = MAX_PAGE_BYTES + 64 * 1024

#: Exit code of a child that could not start, after it sent the reason over its control socket (CannotStart).
CANNOT_START = 2


class ChildCommand(NamedTuple):
    """The command of a child: `python -m MODULE PID CONTROL_FD HEARTBEAT_FD [SHARED_FD ...]`, read by `enter_child`."""

    name: str
    module: str
    #: None: that of this process.
    stderr: int | None = None
    #: Further files that the child inherits.
    shared: tuple[int, ...] = ()

    def start(self, *files: int) -> subprocess.Popen[bytes]:
        """Start a child that inherits these files. Raise OSError."""
        passed = (*files, *self.shared)
        command = [sys.executable, "-m", self.module, str(os.getpid()), *map(str, passed)]
        with _blocked(*_IGNORED_SIGNALS):
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self.stderr, pass_fds=passed)


class Child:
    """A running child, its control socket and its heartbeat."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], control: ControlChannel, watchdog: Watchdog
    ) -> None:
        self.name = name
        self.process = process
        self._control = control
        self._watchdog = watchdog
        self._has_hung = False
        #: False while `end_within` waits for its end, which has its own timeout.
        self._is_watched = True
        self._ended: asyncio.Task[int] = asyncio.create_task(_wait(process))

    @classmethod
    def start(cls, command: ChildCommand) -> Child:
        """Start the command. Raise OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        watchdog = Watchdog()
        try:
            with theirs:
                process = command.start(theirs.fileno(), watchdog.fd)
        except OSError:
            ours.close()
            watchdog.close()
            raise
        return cls(command.name, process, ControlChannel(ours), watchdog)

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, message: ControlMessage, passed: socket.socket | None = None) -> None:
        """Send a message; kill a child that reads nothing. The end of a dead one is noticed elsewhere."""
        try:
            self._control.send(message, passed)
        except BufferError as error:
            log.error("the %s reads nothing (%s): it hangs and is killed", self.name, error)
            self.kill()
        except OSError:
            pass

    async def messages(self) -> AsyncIterator[ControlMessage]:
        """Yield the child's messages until it has ended."""
        while True:
            try:
                messages = self._control.receive()
            except (EOFError, OSError, FrameError):
                break
            for message in messages:
                yield message
            if not messages:
                await _readable(self._control)
        await self.ended()

    async def ended(self) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        return await asyncio.shield(self._ended)

    def end_if_hung(self) -> None:
        """Kill it if it is silent for longer than it announced, after a moment to print the stacks of its threads.

        Call this every heartbeat.TICK_S, on the event loop.
        """
        if self._ended.done() or not self._is_watched:
            return
        if silence := self._watchdog.tick():
            self._has_hung = not is_stopped(self.pid)
            why = "hangs" if self._has_hung else "is stopped from outside"
            log.error("the %s %s: it %s and is killed", self.name, silence, why)
            self.process.send_signal(WHERE_SIGNAL)
            asyncio.get_running_loop().call_later(_PRINT_STACKS_S, self.kill)

    @property
    def is_at_fault(self) -> bool:
        """Whether a child that has ended did so by its own fault, not by a signal that others sent."""
        code = self.process.returncode
        return self._has_hung or code > 0 or -code in _FATAL_SIGNALS

    def kill(self) -> None:
        """Kill it now."""
        if self.process.returncode is None:
            self.process.kill()

    async def end_within(self, timeout_s: float) -> int:
        """Wait for it to end, then kill it; its silence meanwhile does not count as a hang."""
        self._is_watched = False
        try:
            return await asyncio.wait_for(self.ended(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.ended()

    def close(self) -> None:
        self._control.close()
        self._watchdog.close()


class ChildContext(NamedTuple):
    """The context that a child gets from its supervisor."""

    control: ControlChannel
    begin: Begin
    #: Messages that came after `begin`.
    messages: list[ControlMessage]
    heartbeat: SharedHeartbeat
    #: The further files of its command.
    shared: tuple[int, ...]

    def refuse(self, reason: str) -> int:
        """Report why this process cannot start; return the exit code for that."""
        self.control.send(CannotStart(reason))
        return CANNOT_START


def enter_child(argv: list[str]) -> ChildContext:
    """Set up this process as a child and return its context; call it first in a child's main.

    From here on the child dies with its supervisor and ignores signals that request an end: the supervisor waits for
    running requests before it ends its children. SIGUSR1 prints the stacks of its threads.
    """
    supervisor_pid, fd, heartbeat_fd, *shared = map(int, argv[1:])
    behave_as_child(supervisor_pid, fd, heartbeat_fd, *shared)
    control = ControlChannel(socket.socket(fileno=fd), max_bytes=_MAX_MESSAGE_BYTES)
    try:
        while not (messages := control.receive()):
            pass  # only a part of the first message has come
        begin, *messages = messages
    except EOFError:
        raise SystemExit(1) from None
    if not isinstance(begin, Begin):
        raise FrameError(f"the supervisor began with {begin}")
    return ChildContext(control, begin, messages, SharedHeartbeat(heartbeat_fd), tuple(shared))


def behave_as_child(parent_pid: int, *files: int) -> None:
    """Have this process die with its parent, ignore the signals of a child, and keep the files for itself."""
    die_with(parent_pid)
    faulthandler.enable()
    faulthandler.register(WHERE_SIGNAL)
    for signum in _IGNORED_SIGNALS:
        if signum != WHERE_SIGNAL:
            signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)
    for each in files:
        os.set_inheritable(each, False)


def die_with(parent_pid: int) -> None:
    """Have this process end when its parent ends or is killed (Linux); exit now if the parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """Block the signals; a child inherits the mask, so that none interrupts it before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the process; return the exit code."""
    if not hasattr(os, "pidfd_open"):
        return await asyncio.to_thread(process.wait)
    pidfd = os.pidfd_open(process.pid)
    try:
        await _readable(pidfd)
    finally:
        os.close(pidfd)
    return process.wait()


async def _readable(file: int | ControlChannel) -> None:
    loop = asyncio.get_running_loop()
    fd = file if isinstance(file, int) else file.fileno()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
