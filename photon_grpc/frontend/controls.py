"""An operator's orders to the engine, and its replies."""

from __future__ import annotations

import asyncio
import itertools

from photon_grpc.core.frames import Control, Reply, Verb
from photon_grpc.core.ports import EngineLink
from photon_grpc.errors import EngineRestarting


class Controls:
    """Belongs to one event loop."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    async def send(self, verb: Verb, names: tuple[str, ...] = ()) -> Reply:
        """Return the engine's reply. Raise Unavailable where there is none, or it goes meanwhile."""
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
        """The engine is gone: whether it obeyed is not known."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineRestarting("the engine was lost"))
