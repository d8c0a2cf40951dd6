"""The live picture of the engine as JSON, for the page."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Facts
from photon_grpc.errors import Draining
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.readiness import State
from photon_grpc.frontend.watchers import Watcher
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.guard import Endpoint

_WATCHING = b": watching\n\n"


def picture_json(picture: EnginePicture, facts: Facts) -> bytes:
    """Return one JSON object without line breaks; steps and lanes are arrays in the order of their class's fields."""
    load = picture.load
    return msgspec.json.encode(
        {
            "time_s": picture.time_s,
            "num_slots": facts.max_num_seqs,
            "num_blocks": facts.num_blocks,
            "block_size": facts.kv.block_size,
            "device": facts.device,
            "steps": picture.steps,
            "num_steps": picture.num_steps,
            "lanes": picture.lanes,
            "queued": load.queued,
            "blocks": {
                "owned": load.owned_blocks,
                "cached": load.cached_blocks,
                "limbo": load.limbo_blocks,
                "free": load.free_blocks,
            },
            "output_tokens_per_s": round(load.output_tokens_per_s, 1),
            "prompt_tokens_per_s": round(load.prompt_tokens_per_s, 1),
        }
    )


class EngineFeed:
    """GET /engine/events: the pictures as server-sent events, while a viewer reads."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._watchers: set[Watcher] = set()
        frontend.on_state(self._on_state)

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("/engine/events", self.answer, ("GET",), ("admin",)),)

    async def answer(self, call: HttpCall) -> Response | None:
        if self._frontend.state is State.DRAINING:
            raise Draining()
        with self._frontend.watch() as watcher:
            self._watchers.add(watcher)
            try:
                # Shows the viewer that it watches, also while there is no engine.
                await call.events.write(_WATCHING)
                async for picture in watcher:
                    await call.events.write(b"data: " + picture_json(picture, self._frontend.facts) + b"\n\n")
            finally:
                self._watchers.discard(watcher)
        return None

    def _on_state(self, state: State) -> None:
        """End all feeds when the server drains, which waits for open answers."""
        if state is State.DRAINING:
            for watcher in tuple(self._watchers):
                watcher.close()
