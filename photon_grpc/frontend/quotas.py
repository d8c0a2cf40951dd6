"""The quotas of API keys in a front end, applied before the prompt is tokenized.

Prompt tokens count when the request is sent to the engine, delivered output tokens when it ends.
"""

from __future__ import annotations

from types import TracebackType

from photon_grpc.core.quotas import Quotas
from photon_grpc.core.request import NO_LIMITS, OwnerLimits


class QuotaLease:
    """One request's use of its owner's quotas, unlimited. If an exception leaves its context, nothing was sent."""

    limits: OwnerLimits = NO_LIMITS
    #: Requests of its owner in this front end, itself included; 0 if they are not counted.
    num_running = 0

    def __enter__(self) -> QuotaLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end(0)

    def check_prompt(self, num_tokens: int) -> None:
        """Raise QuotaExceeded if the owner has not enough tokens for the prompt now."""

    def sent(self, num_prompt_tokens: int) -> None:
        """Count the prompt of a request that was sent to the engine."""

    def end(self, num_output_tokens: int) -> None:
        """Count the output of a request that is over; called once."""


class NoFrontendQuotas:
    """No quotas, for a server without API keys."""

    _LEASE = QuotaLease()

    def lease(self, owner: str, deadline_s: float | None) -> QuotaLease:
        return self._LEASE


NO_FRONTEND_QUOTAS = NoFrontendQuotas()


class FrontendQuotas:
    """The quotas of the owners in one front end."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def lease(self, owner: str, deadline_s: float | None) -> QuotaLease:
        """Count one more request of `owner`, with a deadline. Raise QuotaExceeded."""
        self._quotas.check_running(owner, deadline_s)
        self._quotas.check_tokens(owner, 1, deadline_s)
        self._quotas.enter(owner)
        return _LimitedLease(self._quotas, owner, deadline_s)


class _LimitedLease(QuotaLease):
    def __init__(self, quotas: Quotas, owner: str, deadline_s: float | None) -> None:
        self._quotas = quotas
        self._owner = owner
        self._deadline_s = deadline_s
        self.limits = quotas.limits(owner) or NO_LIMITS
        self.num_running = quotas.num_running(owner)

    def check_prompt(self, num_tokens: int) -> None:
        self._quotas.check_tokens(self._owner, num_tokens, self._deadline_s)

    def sent(self, num_prompt_tokens: int) -> None:
        self._quotas.take(self._owner, num_prompt_tokens)

    def end(self, num_output_tokens: int) -> None:
        self._quotas.take(self._owner, num_output_tokens)
        self._quotas.leave(self._owner)
