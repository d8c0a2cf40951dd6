"""Metrics of the whole service, which the supervisor serves if --metrics-listen is set."""

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
        """Add the counts that a front end reported."""

    def requests_lost(self, num_requests: int) -> None:
        """Count the requests that front ends had when they died."""

    def frontend_ended(self, frontend: int) -> None: ...

    def engine_begins(self, life: int) -> None:
        """Begin the sums of the next engine."""

    def close(self) -> None: ...


class NoMetrics:
    async def start(self) -> None:
        """Do nothing."""

    def told(self, frontend: int, counted: Counted) -> None:
        """Do nothing."""

    def requests_lost(self, num_requests: int) -> None:
        """Do nothing."""

    def frontend_ended(self, frontend: int) -> None:
        """Do nothing."""

    def engine_begins(self, life: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
