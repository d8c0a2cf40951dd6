"""A child process that is restarted with growing pauses when it dies, unless it never worked."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from photon_grpc.bridge.control import CannotStart, ControlMessage
from photon_grpc.errors import StartupError
from photon_grpc.service.processes import address_space
from photon_grpc.service.processes.child import Child, ChildCommand

log = logging.getLogger("photon_grpc")

#: After this many deaths by a signal a child that never worked is given up, after any other end at once.
_EARLY_DEATHS = 3


class ChildCrashed(Exception):
    """A process ended before it ever worked; its last messages are in the log."""


class RestartDelay:
    """The pause before the next start: 0.1 s, doubled each time up to 10 s; reset after a minute of life."""

    def __init__(self, first_s: float = 0.1, longest_s: float = 10.0, forget_after_s: float = 60.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._forget_after_s = forget_after_s
        self._next_s = first_s

    def after(self, lived_s: float) -> float:
        """Return the seconds to wait after the end of a child that lived `lived_s`."""
        if lived_s >= self._forget_after_s:
            self._next_s = self._first_s
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return delay_s


class ManagedProcess:
    """One child at a time; when it dies, the next one is started."""

    def __init__(
        self,
        command: ChildCommand,
        *,
        on_start: Callable[[], None],
        on_message: Callable[[ControlMessage], None],
        on_end: Callable[[Child], None],
    ) -> None:
        self.name = command.name
        #: Set by the owner once a child has worked; from then on the child is restarted after every end.
        self.has_worked = False
        self.child: Child | None = None
        self.num_starts = 0
        self._command = command
        self._on_start = on_start
        self._on_message = on_message
        self._on_end = on_end
        self._backoff = RestartDelay()

    async def keep(self) -> None:
        """Keep a child running until cancelled. Raise StartupError or ChildCrashed if a restart cannot help."""
        deaths = 0
        while True:
            started_s = time.monotonic()
            try:
                self.child = Child.start(self._command)
            except OSError as error:
                if not self.has_worked:
                    raise
                # Memory, processes or descriptors are short, perhaps only for a while.
                await self._pause(started_s, f"cannot be started ({error})")
                continue
            self.num_starts += 1
            self._on_start()
            reason = await self._listen(self.child)
            code = await self.child.ended()
            self.child.close()
            ended, self.child = self.child, None
            self._on_end(ended)
            deaths += 1
            if not self.has_worked:
                self._check_early_death(code, reason, deaths)
            await self._pause(started_s, reason or how_it_ended(code))

    async def _pause(self, started_s: float, problem: str) -> None:
        delay_s = self._backoff.after(time.monotonic() - started_s)
        log.error("the %s %s; restarting in %.1f s", self.name, problem, delay_s)
        await asyncio.sleep(delay_s)

    async def _listen(self, child: Child) -> str:
        """Read its messages until it has ended; return why it could not start, if it reported that."""
        reason = ""
        async for message in child.messages():
            if isinstance(message, CannotStart):
                reason = message.message
            else:
                self._on_message(message)
        return reason

    def _check_early_death(self, code: int, reason: str, deaths: int) -> None:
        if reason:
            raise StartupError(reason)
        if code >= 0 or deaths >= _EARLY_DEATHS:
            raise ChildCrashed(f"the {self.name} {how_it_ended(code)} before it was ready{address_space.hint()}")


def how_it_ended(code: int) -> str:
    """Return `was killed by SIGKILL` or `ended with exit code 1`."""
    names = {-each: each.name for each in signal.Signals}
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {names.get(code, f'signal {-code}')}"
