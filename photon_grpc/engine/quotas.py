"""Quotas of owners over all front ends. The engine sees every request, so its decision is final."""

from __future__ import annotations

import time
from collections.abc import Callable

from photon_grpc.core.quotas import Quotas
from photon_grpc.core.request import OwnerLimits, Request
from photon_grpc.core.sequence import Sequence

#: Limits are remembered for this many owners beyond twice those that use something.
_SPARE_OWNERS = 64


class NoQuotas:
    """No quotas in the engine: there is one front end, which counts itself, or there are no owners."""

    def check(self, request: Request) -> None:
        """Raise QuotaExceeded if the owner may not run this request now."""

    def admitted(self, request: Request) -> None:
        """Count a request that is in flight from now on."""

    def ended(self, seq: Sequence, is_last: bool) -> None:
        """Count an output that has ended; with `is_last` its request has ended too."""


NO_QUOTAS = NoQuotas()


class SharedQuotas(NoQuotas):
    """Quotas by the limits in the newest request of each owner. All buckets are full when an engine starts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits: dict[str, OwnerLimits] = {}
        # The limits of an owner are forgotten once its use is.
        self._quotas = Quotas(lambda owner: self._limits.get(owner), clock)

    def check(self, request: Request) -> None:
        if len(self._limits) > 2 * len(self._quotas) + _SPARE_OWNERS:
            self._limits = {owner: limits for owner, limits in self._limits.items() if owner in self._quotas}
        self._limits[request.owner] = request.limits
        self._quotas.check_running(request.owner, request.deadline_s)
        self._quotas.check_tokens(request.owner, request.num_given, request.deadline_s)

    def admitted(self, request: Request) -> None:
        self._quotas.enter(request.owner)
        self._quotas.take(request.owner, request.num_given)

    def ended(self, seq: Sequence, is_last: bool) -> None:
        self._quotas.take(seq.request.owner, seq.num_generated)
        if is_last:
            self._quotas.leave(seq.request.owner)
