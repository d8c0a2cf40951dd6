"""Whether a front end can serve now, and what it answers where it cannot."""

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
        """`callback` is called with every new state."""
        self._callbacks.append(callback)

    def facts(self) -> Facts:
        """Return the engine's facts. Raise Unavailable where nothing can be served now."""
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
        """Note that the engine has told its facts."""
        if self.state in (State.LOADING, State.RESTARTING):
            self.change(State.SERVING)

    def lost(self) -> None:
        """Note that the engine is gone; another one follows."""
        if self.state in (State.SERVING, State.LOADING):
            self.change(State.RESTARTING)

    def fail(self, why: str) -> None:
        """Note that there will be no engine any more."""
        self._failure = why
        self.change(State.FAILED)

    def change(self, state: State) -> None:
        if self.state is state:
            return
        self.state = state
        for callback in tuple(self._callbacks):
            callback(state)
