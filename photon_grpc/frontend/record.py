"""The record of a finished request, made where it ends and passed to all who count, log or trace requests.

It is plain data. Of a caller's text it holds only the labels, which are for its readers. It costs time once per
request, none per token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Protocol

import msgspec

from photon_grpc.core.ask import Origin
from photon_grpc.core.generation import Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import PhotonError, frames_of

_LOG = logging.getLogger(__name__)

NO_USAGE = Usage()
_MAX_FIELD_CHARS = 200


class RequestRecord(msgspec.Struct, frozen=True):
    """One request from its arrival to its end. Durations count from its arrival."""

    origin: Origin
    #: errors.PhotonError.reason of the error that ended it, "" if it was answered.
    reason: str
    #: When it ended: wall-clock seconds since the epoch.
    end_time_s: float
    total_s: float
    #: One for each output, UNSPECIFIED if it had not ended; () if the request was refused.
    finish_reasons: tuple[FinishReason, ...] = ()
    #: As billed: delivered tokens, even of a cancelled request; the prompt once an output has begun or ended.
    usage: Usage = NO_USAGE
    #: Tokens of the longest output.
    longest_output_tokens: int = 0
    num_preemptions: int = 0
    #: To its first step, None without one.
    queue_s: float | None = None
    first_token_s: float | None = None
    #: To the end of its last output.
    last_token_s: float | None = None
    #: The field for which a request was refused, if it was one field.
    field: str = ""

    @property
    def prefill_s(self) -> float | None:
        """The duration from its first step to its first token."""
        if self.queue_s is None or self.first_token_s is None:
            return None
        return max(self.first_token_s - self.queue_s, 0.0)

    @property
    def decode_s(self) -> float | None:
        """The duration from its first token to its last."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return max(self.last_token_s - self.first_token_s, 0.0)

    @property
    def time_per_output_token_s(self) -> float | None:
        """The mean time between two tokens of an output; outputs run side by side."""
        if self.decode_s is None or self.longest_output_tokens < 2:
            return None
        return self.decode_s / (self.longest_output_tokens - 1)


class RequestObserver(Protocol):
    """A receiver of records, called on the event loop of the front end, which it must not block."""

    def ended(self, record: RequestRecord) -> None: ...


class Observers:
    """All observers of a front end. One that fails harms no request."""

    def __init__(self, observers: Iterable[RequestObserver] = ()) -> None:
        self._observers = tuple(observers)

    def ended(self, record: RequestRecord) -> None:
        for observer in self._observers:
            try:
                observer.ended(record)
            except Exception as error:
                _LOG.error("%s failed, %s\n%s", type(observer).__name__, type(error).__name__, frames_of(error))


NO_OBSERVERS = Observers()


def refused(origin: Origin, error: BaseException) -> RequestRecord:
    """Return the record of a request rejected before it started."""
    field = error.field[:_MAX_FIELD_CHARS] if isinstance(error, PhotonError) else ""
    return RequestRecord(origin, origin.reason(error), time.time(), time.monotonic() - origin.arrival_s, field=field)
