"""An operator's commands to the engine and its replies."""

from __future__ import annotations

import asyncio
import itertools

from photon_grpc.core.frames import Control, Reply, Verb
from photon_grpc.core.ports import EngineLink
from photon_grpc.errors import EngineRestarting


class Controls:
    """The commands that wait for a reply. Belongs to one event loop."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    async def send(self, verb: Verb, names: tuple[str, ...] = ()) -> Reply:
        """Send a command and return the engine's reply. Raise Unavailable if the engine is lost before it replies."""
        control_id = next(self._ids)
        self._link.send(Control(control_id, verb, names))
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[control_id] = reply
        try:
            return await reply
        finally:
            del self._waiting[control_id]

    def replied(self, reply: Reply) -> None:
        waiting = self._waiting.get(reply.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def lost(self) -> None:
        """Fail all waiting commands: the engine is lost, and whether it carried them out is unknown."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineRestarting("the engine was lost"))
