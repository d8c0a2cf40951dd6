"""The supervisor's messages to a front end, read as long as the supervisor lives, also during a drain."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from photon_grpc.bridge.client import BridgeClient
from photon_grpc.bridge.control import ControlMessage, Drain, Link, PageAnswer, Stop
from photon_grpc.service.processes.child import ChildContext
from photon_grpc.service.processes.counts_report import CountsReport, NoReport
from photon_grpc.service.processes.supervisor_pages import SupervisorPages

T = TypeVar("T")


class SupervisorCommands:
    """A task that obeys them, on the event loop."""

    def __init__(
        self, context: ChildContext, link: BridgeClient, report: CountsReport | NoReport, pages: SupervisorPages
    ) -> None:
        self._control = context.control
        self._link = link
        self._report = report
        self._pages = pages
        self._unread = context.messages
        loop = asyncio.get_running_loop()
        self._drain: asyncio.Future[float] = loop.create_future()
        self._stop: asyncio.Future[int] = loop.create_future()
        self._reading = asyncio.create_task(self._read())

    async def until_drain(self) -> float:
        """Wait for the command to drain; return the seconds for running requests, 0 if the supervisor is gone."""
        return await self._first_of(self._drain, 0.0)

    async def until_stop(self, num_left: int) -> int:
        """Wait until all front ends have drained; return the requests cut off, `num_left` without a supervisor."""
        return await self._first_of(self._stop, num_left)

    async def _first_of(self, command: asyncio.Future[T], otherwise: T) -> T:
        await asyncio.wait((command, self._reading), return_when=asyncio.FIRST_COMPLETED)
        if command.done():
            return command.result()
        self._reading.result()
        return otherwise

    async def _read(self) -> None:
        """Obey the supervisor until it is gone."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        self._control.set_blocking(False)
        loop.add_reader(self._control.fileno(), readable.set)
        try:
            while True:
                for message in self._unread:
                    await self._obey(message)
                await readable.wait()
                readable.clear()
                self._unread = self._control.receive()
        except EOFError:
            return
        finally:
            loop.remove_reader(self._control.fileno())

    async def _obey(self, message: ControlMessage) -> None:
        if isinstance(message, Link):
            await self._link.connect(self._control.take_socket())
            self._report.life = message.life
        elif isinstance(message, PageAnswer):
            self._pages.answered(message)
        elif isinstance(message, Drain) and not self._drain.done():
            self._drain.set_result(message.timeout_s)
        elif isinstance(message, Stop) and not self._stop.done():
            self._stop.set_result(message.num_left)
