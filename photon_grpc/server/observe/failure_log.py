"""Rate-limited log of failed calls: ten thousand equal refusals a second are one line, and no work for the loop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import NamedTuple

from photon_grpc.errors import InternalFailure, PhotonError, frames_of
from photon_grpc.server.calls.status import CallStatus

_log = logging.getLogger(__name__)

#: Calls of one kind that get a line of their own in an interval; unforeseen ones come with their frames.
_MAX_LINES = {logging.INFO: 10, logging.ERROR: 2}


class _Kind(NamedTuple):
    level: int
    method: str
    code: str
    #: The class of an unforeseen exception.
    reason: str


class FailureLog:
    """The first calls of a kind in an interval get a line each, the others one in common at its end. Belongs to an
    event loop."""

    def __init__(self, interval_s: float = 5.0, *, has_requests: bool = True) -> None:
        """Without `has_requests` a request that was refused has no line here: it has one of its own in the log of
        requests."""
        self._interval_s = interval_s
        self._has_requests = has_requests
        self._counts: Counter[_Kind] = Counter()

    def report(
        self, error: Exception, status: CallStatus, method: str, duration_s: float, *, is_request: bool = False
    ) -> None:
        """One failed call; of an unforeseen exception the frames, not the text. `is_request`: it was counted as one."""
        is_foreseen = isinstance(error, PhotonError)
        if is_request and not self._has_requests and is_foreseen and not isinstance(error, InternalFailure):
            return
        level, reason = (logging.INFO, status.reason) if is_foreseen else (logging.ERROR, type(error).__name__)
        kind = _Kind(level, method, status.code.name, reason)
        if not self._counts:
            asyncio.get_running_loop().call_later(self._interval_s, self._sum_up)
        self._counts[kind] += 1
        if self._counts[kind] <= _MAX_LINES[level]:
            _tell(level, _fields(error, status, method, duration_s), "" if is_foreseen else frames_of(error))

    def _sum_up(self) -> None:
        counts, self._counts = self._counts, Counter()
        for kind, count in counts.items():
            untold = count - _MAX_LINES[kind.level]
            if untold > 0:
                line = {"event": "more calls failed", **kind._asdict(), "count": untold, "within_s": self._interval_s}
                del line["level"]
                _tell(kind.level, line)


def _tell(level: int, fields: dict[str, object], frames: str = "") -> None:
    text = f"{json.dumps(fields)}\n{frames}" if frames else json.dumps(fields)
    _log.log(level, "%s", text, extra={"fields": fields | {"frames": frames} if frames else fields})


def _fields(error: Exception, status: CallStatus, method: str, duration_s: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "event": "call failed",
        "method": method,
        "code": status.code.name,
        "reason": status.reason,
        "request_id": status.request_id,
        "duration_ms": round(duration_s * 1000, 1),
    }
    if not isinstance(error, PhotonError):
        fields["exception"] = type(error).__name__
    elif error.field:
        fields["field"] = error.field[:200]
    return fields
