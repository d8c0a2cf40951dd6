"""Quotas of owners over all front ends: the engine sees every request, so its verdict is final."""

from __future__ import annotations

import time
from collections.abc import Callable

from photon_grpc.core.quotas import Quotas
from photon_grpc.core.request import OwnerLimits, Request
from photon_grpc.core.sequence import Sequence

#: Owners whose limits are remembered beyond twice those that use something.
_SPARE_OWNERS = 64


class NoQuotas:
    """One front end counts for itself, or there are no owners."""

    def check(self, request: Request) -> None:
        """Raise QuotaExceeded."""

    def admitted(self, request: Request) -> None:
        """It is in flight from here on."""

    def ended(self, seq: Sequence, is_last: bool) -> None:
        """One output is over; `is_last`: its request with it."""


NO_QUOTAS = NoQuotas()


class SharedQuotas(NoQuotas):
    """By the limits that came with the newest request of an owner. An engine that starts takes buckets to be full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits: dict[str, OwnerLimits] = {}
        # Its limits are forgotten once its use is.
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
