"""Rate-limited log of failed calls: ten thousand equal refusals a second are one line, and no work for the loop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from typing import NamedTuple

from photon_grpc.errors import PhotonError, frames_of
from photon_grpc.server.status import CallStatus

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

    def __init__(self, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s
        self._counts: Counter[_Kind] = Counter()

    def report(self, error: Exception, status: CallStatus, method: str, duration_s: float) -> None:
        """One failed call; of an unforeseen exception the frames, not the text."""
        is_foreseen = isinstance(error, PhotonError)
        level, reason = (logging.INFO, status.reason) if is_foreseen else (logging.ERROR, type(error).__name__)
        kind = _Kind(level, method, status.code.name, reason)
        if not self._counts:
            asyncio.get_running_loop().call_later(self._interval_s, self._sum_up)
        self._counts[kind] += 1
        if self._counts[kind] <= _MAX_LINES[level]:
            _log.log(level, "%s", _line(error, status, method, duration_s))

    def _sum_up(self) -> None:
        counts, self._counts = self._counts, Counter()
        for kind, count in counts.items():
            untold = count - _MAX_LINES[kind.level]
            if untold > 0:
                line = {"event": "more calls failed", **kind._asdict(), "count": untold, "within_s": self._interval_s}
                del line["level"]
                _log.log(kind.level, "%s", json.dumps(line))


def _line(error: Exception, status: CallStatus, method: str, duration_s: float) -> str:
    line = {
        "event": "call failed",
        "method": method,
        "code": status.code.name,
        "reason": status.reason,
        "request_id": status.request_id,
        "duration_ms": round(duration_s * 1000, 1),
    }
    if not isinstance(error, PhotonError):
        line["exception"] = type(error).__name__
        return f"{json.dumps(line)}\n{frames_of(error)}"
    if error.field:
        line["field"] = error.field[:200]
    return json.dumps(line)
