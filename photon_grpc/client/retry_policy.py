"""The retry policy: which failures of a request to retry, after what pause, and for how long."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

from photon_grpc.client.channel import MAX_RETRIES, SERVICE_CONFIG
from photon_grpc.client.status import Unreachable
from photon_grpc.errors import (
    DeadlinePassed,
    Draining,
    DuplicateRequestId,
    Overloaded,
    PhotonError,
    QueueFull,
    QueueTimeout,
    QuotaExceeded,
    Unavailable,
)

#: The default timeout of a call.
DEFAULT_TIMEOUT_S = 600.0

#: Time without progress after which a request is given up.
PATIENCE_S = 60.0

#: How often a request that no server has read is sent on another stream; a server that evicts every new one is full.
_MAX_REOPENED = 8

#: The delays of gRPC's retries, which also hold for ours.
_DELAYS = SERVICE_CONFIG["methodConfig"][0]["retryPolicy"]
_FIRST_S = float(_DELAYS["initialBackoff"].removesuffix("s"))
_LONGEST_S = float(_DELAYS["maxBackoff"].removesuffix("s"))
_FACTOR = float(_DELAYS["backoffMultiplier"])

#: Failures that may be temporary or limited to one server. A lost server may still hold the id.
_TEMPORARY = (Unavailable, Overloaded, DuplicateRequestId)
#: Reasons that only our servers give, and that pass as other requests end.
_FULL = (QueueFull, QueueTimeout, QuotaExceeded)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The failures that are retried, after what pause, and for how long.

    | failure | before output | after output has begun |
    |---|---|---|
    | Unavailable, Overloaded | `max_retries` times; with `is_after_grpc` only if gRPC did not | with `resumes` |
    | QuotaExceeded without RetryInfo | no | no |
    | DuplicateRequestId | no | with `resumes` |
    | the stream was evicted while idle | 8 times, at once | with `resumes` |
    | anything else, or a server that says not to retry | no | no |

    Retries end after `patience_s` without progress, and at the deadline of the request.
    """

    max_retries: float = MAX_RETRIES
    resumes: bool = True
    #: gRPC itself retries the call until response headers arrive. After that, and before output, the connection may be
    #: lost, and a call that has received a heartbeat may fail.
    is_after_grpc: bool = False
    #: Time at a server that reports being full does not count against `patience_s`.
    waits_for_room: bool = False
    patience_s: float = PATIENCE_S
    #: The default timeout of a request.
    timeout_s: float = DEFAULT_TIMEOUT_S

    def pause_s(
        self,
        error: PhotonError,
        attempt: int,
        stalled_s: float = 0.0,
        *,
        has_begun: bool,
        has_heartbeat: bool = False,
    ) -> float | None:
        """Return the pause before the next attempt, or None to give up.

        Args:
            error: failure of the last attempt.
            attempt: its number, counted from 1 since the last progress.
            stalled_s: time since the first failure without progress.
            has_begun: output has begun.
            has_heartbeat: the last attempt has received a heartbeat.
        """
        may_retry = self.resumes if has_begun else self._may_retry(error, attempt, has_heartbeat)
        if not self._is_temporary(error) or not may_retry:
            return None
        pause_s = _backoff_s(attempt, has_heartbeat and not has_begun)
        if error.is_left_to_caller and not has_begun:
            pause_s = 0.0
        pause_s = max(pause_s, _server_delay_s(error, has_begun))
        is_patient = stalled_s + pause_s <= self.patience_s or self.is_waiting_for_room(error)
        return pause_s if is_patient else None

    def timeout_of(self, own_s: float | None) -> float:
        """Return the timeout of a request: its own, or the default if that is None."""
        return self.timeout_s if own_s is None else own_s

    def is_waiting_for_room(self, error: PhotonError) -> bool:
        """Return whether the server is merely full, and the policy waits for that without limit."""
        return self.waits_for_room and isinstance(error, _FULL)

    def _is_temporary(self, error: PhotonError) -> bool:
        if error.is_final and not error.is_left_to_caller:
            return False
        is_over_quota = isinstance(error, QuotaExceeded) and error.retry_after_s is None
        return isinstance(error, _TEMPORARY) and not is_over_quota

    def _may_retry(self, error: PhotonError, attempt: int, has_heartbeat: bool) -> bool:
        if error.is_left_to_caller:
            return attempt <= _MAX_REOPENED
        is_after_headers = has_heartbeat or (isinstance(error, Unreachable) and error.was_lost)
        is_ours = not self.is_after_grpc or is_after_headers
        return is_ours and not isinstance(error, DuplicateRequestId) and attempt <= self.max_retries


def _backoff_s(attempt: int, is_in_place_of_grpc: bool) -> float:
    """Return no pause at first, then growing ones, randomly shortened by up to half.

    A retry in place of gRPC's pauses at first, too, as gRPC does.
    """
    exponent = attempt - 1 if is_in_place_of_grpc else attempt - 2
    if exponent < 0:
        return 0.0
    return min(_FIRST_S * _FACTOR ** min(exponent, 32), _LONGEST_S) * random.uniform(0.5, 1.0)


def _server_delay_s(error: PhotonError, has_begun: bool) -> float:
    """Return the least pause that the server requests. A stream leaves a draining server for another at once."""
    if error.is_left_to_caller or (has_begun and isinstance(error, Draining)):
        return 0.0
    return error.retry_after_s or (_FIRST_S if isinstance(error, Overloaded) else 0.0)


@dataclass(slots=True)
class Attempts:
    """The attempts of one request under a policy, until its deadline."""

    policy: RetryPolicy
    timeout_s: float = math.inf
    #: Output has begun.
    has_begun: bool = False
    #: The call of the current attempt has received a heartbeat, after which gRPC does not retry it.
    has_heartbeat: bool = False
    _started_s: float = field(default_factory=lambda: time.monotonic())
    #: Time of the first failure since the last progress.
    _failed_s: float | None = None
    #: Failures since the last progress, by whether the stream was evicted while idle.
    _num_failed: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    @property
    def spent_s(self) -> float:
        """Time since the request was made."""
        return time.monotonic() - self._started_s

    def progress(self) -> None:
        """Reset patience and pauses after progress."""
        self._failed_s = None
        self._num_failed = {False: 0, True: 0}

    def pause_s(self, error: PhotonError) -> float:
        """Return the pause before the next attempt. Raise `error` to give up."""
        now_s = time.monotonic()
        if self._failed_s is None or self.policy.is_waiting_for_room(error):
            self._failed_s = now_s
        self._num_failed[error.is_left_to_caller] += 1
        attempt, stalled_s = self._num_failed[error.is_left_to_caller], now_s - self._failed_s
        pause_s = self.policy.pause_s(
            error, attempt, stalled_s, has_begun=self.has_begun, has_heartbeat=self.has_heartbeat
        )
        self.has_heartbeat = False
        if pause_s is None:
            raise error
        return max(0.0, min(pause_s, self.timeout_s - self.spent_s))

    def left_s(self, error: PhotonError) -> float:
        """Return the time left for another attempt after `error`. Raise DeadlinePassed if there is none."""
        left_s = self.timeout_s - self.spent_s
        if left_s <= 0:
            raise DeadlinePassed(f"{self.timeout_s:g} s have passed; the stream was cut off ({error})") from error
        return left_s
