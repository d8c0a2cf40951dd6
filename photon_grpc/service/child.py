"""Child processes: how they are started, told things, missed at once, and never left behind.

Knows nothing of what a child does. Start children from the main thread: the system ends a child when the *thread* that
made it ends.
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
from photon_grpc.bridge.control import Begin, ControlChannel, ControlMessage
from photon_grpc.bridge.heartbeat import SharedHeartbeat, Watchdog
from photon_grpc.service.signals import END_SIGNALS, IDLE_SIGNALS, WHERE_SIGNAL

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1

#: Signals that do not end a child.
_LEFT_ALONE = (*END_SIGNALS, *IDLE_SIGNALS)
#: Signals that a process brings upon itself.
_FATAL_SIGNALS = {
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
}

#: Time that a child gets to print where it is.
_LAST_WORDS_S = 0.2

#: A child that could not start says why over its control socket (CannotStart) and ends with this.
CANNOT_START = 2


class Child:
    """A running `python -m MODULE`, the control socket to it and its signs of life."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], control: ControlChannel, watchdog: Watchdog
    ) -> None:
        self.name = name
        self.process = process
        self._control = control
        self._watchdog = watchdog
        self._has_hung = False
        #: False once it is waited for: it was told to end, and has its time for that.
        self._is_watched = True
        self._ended: asyncio.Task[int] = asyncio.create_task(_wait(process))

    @classmethod
    def start(cls, name: str, module: str, stderr: int | None = None, shared: tuple[int, ...] = ()) -> Child:
        """Start it, with `stderr` as its own (None: ours) and the files `shared`; it finds what is meant for it with
        `enter_child`. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        watchdog = Watchdog()
        passed = (theirs.fileno(), watchdog.fd, *shared)
        command = [sys.executable, "-m", module, str(os.getpid()), *map(str, passed)]
        try:
            with theirs, _blocked(*_LEFT_ALONE):
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr, pass_fds=passed)
        except OSError:
            ours.close()
            watchdog.close()
            raise
        return cls(name, process, ControlChannel(ours), watchdog)

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, message: ControlMessage, passed: socket.socket | None = None) -> None:
        """Send a message. One that is dead gets nothing, its end is noticed elsewhere; one that reads nothing for long
        is killed."""
        try:
            self._control.send(message, passed)
        except BufferError as error:
            log.error("the %s reads nothing (%s): it hangs and is ended", self.name, error)
            self.kill()
        except OSError:
            pass

    async def messages(self) -> AsyncIterator[ControlMessage]:
        """The child's messages, until it has ended."""
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
        """Waits; returns the exit code, negative for a signal."""
        return await asyncio.shield(self._ended)

    def end_if_hung(self) -> None:
        """Kill it where it is silent for longer than it allowed itself, after it had a moment to print where each of
        its threads is.

        To be called every heartbeat.TICK_S, on the event loop.
        """
        if self._ended.done() or not self._is_watched:
            return
        if told := self._watchdog.tick():
            self._has_hung = not _is_stopped(self.pid)
            why = "hangs" if self._has_hung else "is stopped from outside"
            log.error("the %s %s: it %s and is ended", self.name, told, why)
            self.process.send_signal(WHERE_SIGNAL)
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.kill)

    @property
    def is_at_fault(self) -> bool:
        """Of one that has ended: whether by what it did itself. A signal that others send says nothing of it."""
        code = self.process.returncode
        return self._has_hung or code > 0 or -code in _FATAL_SIGNALS

    def kill(self) -> None:
        """End it now, whatever it does."""
        if self.process.returncode is None:
            self.process.kill()

    async def end_within(self, timeout_s: float) -> int:
        """Wait for its own end, then kill it; its silence is no hang meanwhile."""
        self._is_watched = False
        try:
            return await asyncio.wait_for(self.ended(), timeout_s)
        except TimeoutError:
            self.kill()
            return await self.ended()

    def close(self) -> None:
        self._control.close()
        self._watchdog.close()


class Duty(NamedTuple):
    """A child's belongings from its supervisor."""

    control: ControlChannel
    begin: Begin
    #: Messages that came with it.
    said: list[ControlMessage]
    heartbeat: SharedHeartbeat
    #: Further files, as given to `Child.start`.
    shared: tuple[int, ...]


class RestartDelay:
    """Wait before the next start: 0.1 s, doubled each time up to 10 s; from 0.1 s again after a minute of life."""

    def __init__(self, first_s: float = 0.1, longest_s: float = 10.0, forget_after_s: float = 60.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._forget_after_s = forget_after_s
        self._next_s = first_s

    def after(self, lived_s: float) -> float:
        """Seconds to wait now that a child has ended that lived so long."""
        if lived_s >= self._forget_after_s:
            self._next_s = self._first_s
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._longest_s)
        return delay_s


def enter_child(argv: list[str]) -> Duty:
    """The first thing that a child's main does.

    From here it dies with its supervisor, and leaves signals that ask for an end to it: the supervisor lets running
    requests finish before it ends its children. SIGUSR1 shows where its threads are.
    """
    supervisor_pid, fd, heartbeat_fd, *shared = map(int, argv[1:])
    die_with(supervisor_pid)
    faulthandler.enable()
    faulthandler.register(WHERE_SIGNAL)
    for signum in _LEFT_ALONE:
        if signum != WHERE_SIGNAL:
            signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_ALONE)
    for each in (fd, heartbeat_fd, *shared):
        os.set_inheritable(each, False)
    control = ControlChannel(socket.socket(fileno=fd))
    try:
        while not (messages := control.receive()):
            pass  # a part of the first one
        begin, *said = messages
    except EOFError:
        raise SystemExit(1) from None
    if not isinstance(begin, Begin):
        raise FrameError(f"the supervisor began with {begin}")
    return Duty(control, begin, said, SharedHeartbeat(heartbeat_fd), tuple(shared))


def die_with(parent_pid: int) -> None:
    """This process ends when its parent does, also when that is killed (Linux); at once where it is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


@contextlib.contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    """A child inherits the mask, so that nothing interrupts it before it has said what it ignores."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped it; False where the system does not say (not Linux)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # PID (NAME) STATE ...; a name may hold anything.
            state = stat.read().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state in (b"T", b"t")


async def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit code, as soon as there is one."""
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
