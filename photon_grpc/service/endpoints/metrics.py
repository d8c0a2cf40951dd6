"""/metrics, /health, /healthz and /readyz of the whole service.

The supervisor serves them: it outlives all other processes, so that no counter falls when one of them dies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus

from photon_grpc.bridge.control import Counted
from photon_grpc.core.counts import EngineSums, Series, Sums
from photon_grpc.core.frames import Facts
from photon_grpc.observe import metrics
from photon_grpc.service.endpoints.http import HttpEndpoint
from photon_grpc.service.endpoints.pages import Page, render
from photon_grpc.service.endpoints.service_metrics import ServiceState

_LOG = logging.getLogger("photon_grpc")

#: Stands for a front end: the counts of the supervisor itself.
_OWN = -1


class MetricsEndpoint:
    """The ServiceMetrics that are counted, and served in plain HTTP at `addresses`, none or one."""

    def __init__(self, addresses: Sequence[str], served: Callable[[], ServiceState]) -> None:
        self._addresses = addresses
        self._served = served
        self._frontends = Sums()
        self._engines = EngineSums()
        self._num_lost = 0
        self._life = 0
        self._facts: Facts | None = None
        self._pages = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/health": self._readyz,
        }
        self._http = HttpEndpoint(self._pages)

    async def start(self) -> None:
        """Listen. Raise ConfigError."""
        for address in self._addresses:
            _LOG.info("metrics on http://%s/metrics", await self._http.start(address))

    def received(self, frontend: int, counted: Counted) -> None:
        self._frontends.update(frontend, counted.series)
        self._engines.update(counted.life, counted.load)

    def requests_lost(self, num_requests: int) -> None:
        self._num_lost += num_requests
        self._frontends.update(_OWN, (Series(metrics.LOST.name, (), (self._num_lost,)),))

    def frontend_ended(self, frontend: int) -> None:
        self._frontends.gone(frontend)

    def engine_begins(self, life: int) -> None:
        self._life = life
        self._engines.begin(life)

    def page(self, path: str, accept: str) -> Page:
        return render(self._pages, path, accept)

    def close(self) -> None:
        self._http.close()

    def _metrics(self, accept: str) -> Page:
        # Imported for the first scraper only: prometheus_client would delay every start.
        from photon_grpc.observe.exposition import Snapshot

        served = self._served()
        # The labels stay while an engine is restarted.
        self._facts = served.facts or self._facts
        snapshot = Snapshot(self._engines.load(self._life), self._frontends, *served._replace(facts=self._facts))
        return Page(*snapshot.page(accept))

    def _healthz(self, accept: str) -> Page:
        # Like the gRPC health of "": the process that answers restarts all others.
        return Page(b"SERVING\n")

    def _readyz(self, accept: str) -> Page:
        if self._served().is_ready:
            return Page(b"SERVING\n")
        return Page(b"NOT_SERVING\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
