"""The drain of one front end, whose messages are read until it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from photon_grpc.bridge.control import ControlMessage, Drain, Drained
from photon_grpc.service.processes.child import Child


class FrontendDrain:
    """One front end's drain, on the supervisor's event loop."""

    def __init__(
        self,
        child: Child,
        timeout_s: float,
        *,
        on_message: Callable[[ControlMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        """Command the drain. `on_message` gets all other messages; `on_end` is called when the process has ended."""
        self.child = child
        self._on_message = on_message
        self._on_end = on_end
        self._num_left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        child.send(Drain(timeout_s))

    async def listen(self) -> None:
        """Read its messages until it has ended."""
        async for message in self.child.messages():
            if isinstance(message, Drained):
                self._settle(message.num_left)
            else:
                self._on_message(message)
        self._on_end()
        self._settle(0)

    async def num_left(self, timeout_s: float) -> int:
        """Return the number of requests that it cut off; 0 if it died, or was killed after `timeout_s`."""
        try:
            return await asyncio.wait_for(self._num_left, timeout_s)
        except TimeoutError:
            self.child.kill()
            return 0

    def _settle(self, num_left: int) -> None:
        if not self._num_left.done():
            self._num_left.set_result(num_left)
