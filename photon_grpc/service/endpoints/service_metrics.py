"""Metrics of the whole service, told by the supervisor where --metrics-listen asks for them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from photon_grpc.bridge.control import Counted
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

    def requests_lost(self, num_requests: int) -> None:
        """Front ends that died took so many requests with them."""

    def frontend_ended(self, frontend: int) -> None: ...

    def engine_begins(self, life: int) -> None:
        """The next one."""

    def close(self) -> None: ...


class NoMetrics:
    async def start(self) -> None:
        """Nothing."""

    def told(self, frontend: int, counted: Counted) -> None:
        """Nothing."""

    def requests_lost(self, num_requests: int) -> None:
        """Nothing."""

    def frontend_ended(self, frontend: int) -> None:
        """Nothing."""

    def engine_begins(self, life: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
