"""Quotas of owners: requests in flight, and tokens per minute as a token bucket that holds one minute's worth.

Prompt tokens are taken when a request is sent to the engine, output tokens when it ends. A bucket can therefore fall
below 0; until it has filled up again, no new request of its owner begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from photon_grpc.core.request import OwnerLimits
from photon_grpc.errors import RETRY_AFTER_S, QuotaExceeded

_MINUTE_S = 60.0
#: Least number of owners that are remembered.
_LEAST_OWNERS = 64


@dataclass(slots=True)
class _Use:
    """The use of one owner."""

    num_running: int = 0
    #: Level of the bucket, possibly below 0. None: full, since nothing was ever taken.
    level: float | None = None
    filled_s: float = 0.0


class Quotas:
    """The use of all owners. A front end counts what it sends, the engine what all front ends send."""

    def __init__(
        self, limits_of: Callable[[str], OwnerLimits | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Count against `limits_of` an owner, which may change at any time; None is without limits."""
        self._limits_of = limits_of
        self._clock = clock
        #: All owners with running requests or a bucket that is not full, and some others.
        self._uses: dict[str, _Use] = {}
        self._max_uses = _LEAST_OWNERS

    def __contains__(self, owner: str) -> bool:
        """Return whether the owner is remembered; one that is not counts as new."""
        return owner in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def limits(self, owner: str) -> OwnerLimits | None:
        return self._limits_of(owner)

    def num_running(self, owner: str) -> int:
        use = self._uses.get(owner)
        return use.num_running if use else 0

    def check_running(self, owner: str, deadline_s: float | None) -> None:
        """Raise QuotaExceeded if one more request of `owner`, with this deadline, may not run."""
        limits = self._limits_of(owner)
        running = self.num_running(owner)
        if limits is not None and limits.max_concurrent is not None and running >= limits.max_concurrent:
            message = f"{running} requests of this API key are running; the limit is {limits.max_concurrent}"
            raise self._exceeded(message, RETRY_AFTER_S, deadline_s, running + 1, limits.max_concurrent)

    def check_tokens(self, owner: str, num_tokens: int, deadline_s: float | None) -> None:
        """Raise QuotaExceeded if the bucket holds fewer than `num_tokens`."""
        rate = self._rate(owner)
        if rate is None:
            return
        level = self._level(self._uses.get(owner) or _Use(), rate)
        if num_tokens > rate:
            message = f"the prompt has {num_tokens} tokens; this API key may use {rate} per minute"
            raise self._exceeded(message, None, deadline_s, num_tokens, rate)
        if num_tokens > level:
            message = f"this API key may use {rate} tokens per minute, and has"
            wait_s = (num_tokens - level) * _MINUTE_S / rate
            raise self._exceeded(f"{message} {max(int(level), 0)} left", wait_s, deadline_s, num_tokens, rate)

    def take(self, owner: str, num_tokens: int) -> None:
        rate = self._rate(owner)
        if rate is not None:
            use = self._use(owner)
            use.level = self._level(use, rate) - num_tokens

    def enter(self, owner: str) -> None:
        """Count one more running request."""
        self._use(owner).num_running += 1

    def leave(self, owner: str) -> None:
        self._use(owner).num_running -= 1

    def _rate(self, owner: str) -> int | None:
        limits = self._limits_of(owner)
        return None if limits is None else limits.tokens_per_minute

    def _use(self, owner: str) -> _Use:
        use = self._uses.get(owner)
        if use is None:
            self._forget_unused()
            use = self._uses[owner] = _Use()
        return use

    def _forget_unused(self) -> None:
        if len(self._uses) >= self._max_uses:
            self._uses = {owner: use for owner, use in self._uses.items() if not self._is_unused(owner, use)}
            self._max_uses = max(2 * len(self._uses), _LEAST_OWNERS)

    def _is_unused(self, owner: str, use: _Use) -> bool:
        rate = self._rate(owner)
        if rate is None:
            # The limits of an owner with a debt may come back.
            return not use.num_running and use.level is None
        return not use.num_running and self._level(use, rate) >= rate

    def _level(self, use: _Use, rate: int) -> float:
        now_s = self._clock()
        level = rate if use.level is None else use.level + (now_s - use.filled_s) * rate / _MINUTE_S
        use.level, use.filled_s = min(level, float(rate)), now_s
        return use.level

    def _exceeded(
        self, message: str, wait_s: float | None, deadline_s: float | None, needed: int, limit: int
    ) -> QuotaExceeded:
        """Make the error; `wait_s` None means that waiting does not help."""
        error = QuotaExceeded(message, needed=needed, limit=limit, retry_after_s=wait_s)
        error.is_final = wait_s is None or (deadline_s is not None and self._clock() + wait_s > deadline_s)
        return error
