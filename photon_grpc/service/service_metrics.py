"""Metrics of the whole service, told by the supervisor where --metrics-listen asks for them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from photon_grpc.bridge.control import Counted, FrontendLost
from photon_grpc.core.frames import Facts


class Served(NamedTuple):
    """The service as its supervisor sees it."""

    is_ready: bool
    #: None while no engine is ready.
    facts: Facts | None
    model: str
    num_frontends: int
    num_engine_restarts: int
    num_frontend_restarts: int


class ServiceMetrics(Protocol):
    async def start(self) -> None:
        """Listen. Raise ConfigError."""

    def told(self, frontend: int, counted: Counted) -> None:
        """The front end in this place has counted."""

    def frontend_joined(self, frontend: int, connection: int) -> None:
        """The front end in this place is joined to the engine, which knows it by this number."""

    def frontend_lost(self, lost: FrontendLost) -> None:
        """The engine's account."""

    def frontend_ended(self, frontend: int) -> None: ...

    def engine_begins(self, life: int) -> None:
        """The next one."""

    def engine_is_ready(self) -> None: ...

    def close(self) -> None: ...


class NoMetrics:
    async def start(self) -> None:
        """Nothing."""

    def told(self, frontend: int, counted: Counted) -> None:
        """Nothing."""

    def frontend_joined(self, frontend: int, connection: int) -> None:
        """Nothing."""

    def frontend_lost(self, lost: FrontendLost) -> None:
        """Nothing."""

    def frontend_ended(self, frontend: int) -> None:
        """Nothing."""

    def engine_begins(self, life: int) -> None:
        """Nothing."""

    def engine_is_ready(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
