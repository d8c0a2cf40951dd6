"""Whether a front end can serve now, and the error it answers with while it cannot."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from photon_grpc.core.frames import Facts
from photon_grpc.core.ports import EngineLink
from photon_grpc.errors import Draining, EngineFailure, EngineRestarting, ModelLoading


class State(Enum):
    LOADING = "loading"
    SERVING = "serving"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


class Readiness:
    """Follows the engine's link; belongs to one event loop."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self.state = State.LOADING if link.facts is None else State.SERVING
        self._failure = ""
        self._callbacks: list[Callable[[State], None]] = []

    def on_state(self, callback: Callable[[State], None]) -> None:
        """Call `callback` with every new state."""
        self._callbacks.append(callback)

    def facts(self) -> Facts:
        """Return the engine's facts. Raise Unavailable if nothing can be served now."""
        facts = self._link.facts
        if self.state is State.SERVING and facts is not None:
            return facts
        if self.state is State.DRAINING:
            raise Draining()
        if self.state is State.FAILED:
            raise EngineFailure(self._failure)
        if self.state is State.LOADING:
            raise ModelLoading()
        raise EngineRestarting()

    def linked(self) -> None:
        """Note that the engine has sent its facts."""
        if self.state in (State.LOADING, State.RESTARTING):
            self.change(State.SERVING)

    def lost(self) -> None:
        """Note that the engine is lost and that another one will start."""
        if self.state in (State.SERVING, State.LOADING):
            self.change(State.RESTARTING)

    def fail(self, why: str) -> None:
        """Note that no other engine will start."""
        self._failure = why
        self.change(State.FAILED)

    def change(self, state: State) -> None:
        if self.state is state:
            return
        self.state = state
        for callback in tuple(self._callbacks):
            callback(state)
