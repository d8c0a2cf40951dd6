"""Observers of a front end's calls and requests, chosen once by the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from photon_grpc.config.api_keys import read_api_keys
from photon_grpc.config.flags import ServerConfig
from photon_grpc.core.counts import Counts
from photon_grpc.frontend.record import RequestObserver
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.observe.metrics import CallMetrics, KeyMetrics, LabelMetrics, RequestMetrics
from photon_grpc.observe.request_log import RequestLog
from photon_grpc.server.calls.guard import NO_COUNTS, CallRules, KeyCheck


@dataclass(frozen=True, slots=True)
class Observability:
    """The observers, none without metrics and logs."""

    observers: tuple[RequestObserver, ...] = ()
    #: None if nothing is counted.
    counts: Counts | None = None
    failures: FailureLog = field(default_factory=FailureLog)

    def rules(self, replica_id: str, keys: KeyCheck) -> CallRules:
        """Return the rules for all calls of the replica."""
        return CallRules(self.failures, replica_id, keys, CallMetrics(self.counts) if self.counts else NO_COUNTS)


def observation(config: ServerConfig) -> Observability:
    """Choose the observers. Raise ConfigError for an unusable file of API keys."""
    counts = None
    observers: list[RequestObserver] = []
    if config.has_metrics:
        counts = Counts()
        observers.append(RequestMetrics(counts))
        if config.api_keys_file:
            observers.append(KeyMetrics(counts, (key.name for key in read_api_keys(config.api_keys_file))))
        if config.metrics_label:
            observers.append(LabelMetrics(counts, config.metrics_label))
    if config.log_requests:
        observers.append(RequestLog())
    return Observability(tuple(observers), counts, FailureLog(has_requests=not config.log_requests))
