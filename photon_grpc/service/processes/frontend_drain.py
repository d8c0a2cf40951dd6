"""The drain of one front end, heard until it has ended: it counts on while it answers what is running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from photon_grpc.bridge.control import ControlMessage, Drain, Drained
from photon_grpc.service.processes.child import Child


class FrontendDrain:
    """Belongs to the supervisor's event loop."""

    def __init__(
        self,
        child: Child,
        timeout_s: float,
        *,
        on_message: Callable[[ControlMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        """Tell it to drain. `on_message` gets all else that it says; `on_end` is called when it has ended."""
        self.child = child
        self._on_message = on_message
        self._on_end = on_end
        self._num_left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        child.tell(Drain(timeout_s))

    async def listen(self) -> None:
        """Until it has ended."""
        async for message in self.child.messages():
            if isinstance(message, Drained):
                self._settle(message.num_left)
            else:
                self._on_message(message)
        self._on_end()
        self._settle(0)

    async def num_left(self, timeout_s: float) -> int:
        """Return requests that it still had at the end of its drain; 0 where it died instead, or was killed for taking
        longer than `timeout_s`."""
        try:
            return await asyncio.wait_for(self._num_left, timeout_s)
        except TimeoutError:
            self.child.kill()
            return 0

    def _settle(self, num_left: int) -> None:
        if not self._num_left.done():
            self._num_left.set_result(num_left)
