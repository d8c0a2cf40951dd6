"""The rate-limited log of failed calls. Ten thousand equal refusals per second become one line and hardly any work."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import NamedTuple, Protocol

from photon_grpc.errors import InternalFailure, PhotonError, frames_of

_log = logging.getLogger(__name__)

#: Calls of one kind that get their own line per interval. Lines of unexpected exceptions include their frames.
_MAX_LINES = {logging.INFO: 10, logging.ERROR: 2}


class FailureStatus(Protocol):
    """The status with which a call ends, of whichever protocol."""

    @property
    def code_name(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def request_id(self) -> str: ...


class _Kind(NamedTuple):
    level: int
    method: str
    code: str
    #: An error's reason, or the class of an unexpected exception.
    reason: str


class FailureLog:
    """The log of one event loop. Per interval the first calls of a kind get a line each, and the others share one."""

    def __init__(self, interval_s: float = 5.0, *, has_requests: bool = True) -> None:
        """Create the log. Pass `has_requests=False` if refused requests have their line in the request log."""
        self._interval_s = interval_s
        self._has_requests = has_requests
        self._counts: Counter[_Kind] = Counter()

    def report(
        self, error: Exception, status: FailureStatus, method: str, duration_s: float, *, is_request: bool = False
    ) -> None:
        """Log one failed call (`is_request`: counted as a request); an unexpected exception without its text."""
        is_foreseen = isinstance(error, PhotonError)
        if is_request and not self._has_requests and is_foreseen and not isinstance(error, InternalFailure):
            return
        level, reason = (logging.INFO, status.reason) if is_foreseen else (logging.ERROR, type(error).__name__)
        kind = _Kind(level, method, status.code_name, reason)
        if not self._counts:
            asyncio.get_running_loop().call_later(self._interval_s, self._sum_up)
        self._counts[kind] += 1
        if self._counts[kind] <= _MAX_LINES[level]:
            _write(level, _fields(error, status, method, duration_s), "" if is_foreseen else frames_of(error))

    def _sum_up(self) -> None:
        counts, self._counts = self._counts, Counter()
        for kind, count in counts.items():
            surplus = count - _MAX_LINES[kind.level]
            if surplus > 0:
                line = {"event": "more calls failed", **kind._asdict(), "count": surplus, "within_s": self._interval_s}
                del line["level"]
                _write(kind.level, line)


def _write(level: int, fields: dict[str, object], frames: str = "") -> None:
    text = f"{json.dumps(fields)}\n{frames}" if frames else json.dumps(fields)
    _log.log(level, "%s", text, extra={"fields": fields | {"frames": frames} if frames else fields})


def _fields(error: Exception, status: FailureStatus, method: str, duration_s: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "event": "call failed",
        "method": method,
        "code": status.code_name,
        "reason": status.reason,
        "request_id": status.request_id,
        "duration_ms": round(duration_s * 1000, 1),
    }
    if not isinstance(error, PhotonError):
        fields["exception"] = type(error).__name__
    elif error.field:
        fields["field"] = error.field[:200]
    return fields
