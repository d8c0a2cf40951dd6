"""Every failure that a caller, an operator or another process of ours can meet.

    PhotonError
    ├── RequestError                   REQUEST_ERROR           one request is refused or fails; the server goes on
    │   ├── InvalidRequest             INVALID_REQUEST         a field is wrong; `field` names it
    │   │   ├── MalformedMessage       MALFORMED_MESSAGE       bytes that are no message
    │   │   ├── PromptTooLong          PROMPT_TOO_LONG         needed and limit, in tokens
    │   │   ├── InvalidConstraint      INVALID_CONSTRAINT      structured output that cannot be compiled or met
    │   │   └── InvalidTemplate        INVALID_TEMPLATE        the chat template refused; the line
    │   ├── ModelNotFound              MODEL_NOT_FOUND
    │   ├── FeatureNotSupported        FEATURE_NOT_SUPPORTED   which one, and the field that asked for it
    │   ├── DuplicateRequestId         DUPLICATE_REQUEST_ID
    │   ├── NotAllowed                 NOT_ALLOWED
    │   │   ├── MissingCredentials     MISSING_CREDENTIALS
    │   │   ├── InvalidCredentials     INVALID_CREDENTIALS
    │   │   └── ScopeRequired          SCOPE_REQUIRED
    │   ├── Overloaded                 OVERLOADED              `retry_after_s` says when to come back
    │   │   ├── QueueFull              QUEUE_FULL
    │   │   ├── QueueTimeout           QUEUE_TIMEOUT
    │   │   └── QuotaExceeded          QUOTA_EXCEEDED
    │   ├── KVCapacity                 KV_CAPACITY             needed and limit, in blocks
    │   ├── DeadlinePassed             DEADLINE_PASSED
    │   │   └── DeadlineUnreachable    DEADLINE_UNREACHABLE    refused before the deadline, which it could not meet
    │   ├── NumericFailure             NUMERIC_FAILURE         NaN logits
    │   ├── RequestQuarantined         REQUEST_QUARANTINED     it crashed the engine twice
    │   ├── AbortedByAdmin             ABORTED_BY_ADMIN
    │   ├── Cancelled                  CANCELLED               by its caller, amid others on a multiplexed stream
    │   └── InternalFailure            INTERNAL_FAILURE        a defect of ours, told without its insides
    ├── Unavailable                    UNAVAILABLE             cannot serve now; `retry_after_s` says when to come back
    │   ├── ModelLoading               MODEL_LOADING
    │   ├── Draining                   DRAINING
    │   ├── EngineRestarting           ENGINE_RESTARTING       nothing was sent yet: retry
    │   ├── EngineFailure              ENGINE_FAILURE          output had begun: continue from it
    │   └── IdleStreamEvicted          IDLE_STREAM_EVICTED     others needed the place of an idle stream: open it again
    ├── Closed                         CLOSED                  the LLM was closed, before the call or during it
    └── StartupError                   the service cannot start: says what to do, ends with exit code 2
        ├── ConfigError                a flag or PHOTON_ variable
        └── ModelLoadError             a file of the model directory; names the tensor or the key

An error carries what was asked and what is possible (`needed`, `limit`, in the unit that the message names). The
reason of a group (REQUEST_ERROR, NOT_ALLOWED, OVERLOADED, UNAVAILABLE) is of a failure of which no more is known, as of
a proxy's; the server itself gives one of a member. Status codes belong to `server`.
"""

from __future__ import annotations

import traceback
from typing import Any

#: A caller's retry delay where nothing tells how long something takes.
RETRY_AFTER_S = 1.0
#: Frames of a traceback that are told: where it began, where it ended.
_FIRST_FRAMES = 4
_LAST_FRAMES = 5


class PhotonError(Exception):
    """Base of all. `str(error)` is fit for the caller: no path, prompt, class or stack of ours."""

    reason = "INTERNAL_FAILURE"
    #: Of one that may be asked again: doing so cannot succeed, or not before the caller's deadline.
    is_final = False
    #: Its caller may ask again when there is something to ask; gRPC itself is not to.
    is_left_to_caller = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        needed: int | None = None,
        limit: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.needed = needed
        self.limit = limit
        self.retry_after_s = retry_after_s


class RequestError(PhotonError):
    """One request is refused or fails."""

    reason = "REQUEST_ERROR"


class InvalidRequest(RequestError):
    reason = "INVALID_REQUEST"
    #: Further mistakes, as (field, message).
    also: tuple[tuple[str, str], ...] = ()


class MalformedMessage(InvalidRequest):
    reason = "MALFORMED_MESSAGE"


class PromptTooLong(InvalidRequest):
    reason = "PROMPT_TOO_LONG"


class InvalidConstraint(InvalidRequest):
    reason = "INVALID_CONSTRAINT"


class InvalidTemplate(InvalidRequest):
    reason = "INVALID_TEMPLATE"


class ModelNotFound(RequestError):
    reason = "MODEL_NOT_FOUND"


class FeatureNotSupported(RequestError):
    reason = "FEATURE_NOT_SUPPORTED"


class DuplicateRequestId(RequestError):
    reason = "DUPLICATE_REQUEST_ID"


class NotAllowed(RequestError):
    """The caller may not do this."""

    reason = "NOT_ALLOWED"


class MissingCredentials(NotAllowed):
    reason = "MISSING_CREDENTIALS"


class InvalidCredentials(NotAllowed):
    reason = "INVALID_CREDENTIALS"


class ScopeRequired(NotAllowed):
    reason = "SCOPE_REQUIRED"


class Overloaded(RequestError):
    """There is no room now; come back after `retry_after_s`."""

    reason = "OVERLOADED"


class QueueFull(Overloaded):
    reason = "QUEUE_FULL"


class QueueTimeout(Overloaded):
    reason = "QUEUE_TIMEOUT"


class QuotaExceeded(Overloaded):
    reason = "QUOTA_EXCEEDED"


class KVCapacity(RequestError):
    reason = "KV_CAPACITY"


class DeadlinePassed(RequestError):
    reason = "DEADLINE_PASSED"


class DeadlineUnreachable(DeadlinePassed):
    """The deadline would pass: who catches a passed one is told at once."""

    reason = "DEADLINE_UNREACHABLE"


class NumericFailure(RequestError):
    reason = "NUMERIC_FAILURE"


class RequestQuarantined(RequestError):
    reason = "REQUEST_QUARANTINED"


class AbortedByAdmin(RequestError):
    reason = "ABORTED_BY_ADMIN"


class Cancelled(RequestError):
    reason = "CANCELLED"


class InternalFailure(RequestError):
    reason = "INTERNAL_FAILURE"


class Unavailable(PhotonError):
    """The server cannot serve now."""

    reason = "UNAVAILABLE"
    #: What callers read, and when they may ask again, unless more is known.
    text = "the server cannot serve now"
    usual_retry_s: float | None = None

    def __init__(self, message: str = "", **facts: Any) -> None:
        facts.setdefault("retry_after_s", self.usual_retry_s)
        super().__init__(message or self.text, **facts)


class ModelLoading(Unavailable):
    reason = "MODEL_LOADING"
    text = "the model is being loaded"
    usual_retry_s = RETRY_AFTER_S


class Draining(Unavailable):
    reason = "DRAINING"
    text = "the server is draining"
    usual_retry_s = RETRY_AFTER_S


class EngineRestarting(Unavailable):
    reason = "ENGINE_RESTARTING"
    text = "the engine is restarting"
    usual_retry_s = RETRY_AFTER_S


class EngineFailure(Unavailable):
    reason = "ENGINE_FAILURE"


class IdleStreamEvicted(Unavailable):
    """The stream is opened again with the next request: idle ones opened at once would take turns without end."""

    reason = "IDLE_STREAM_EVICTED"
    is_left_to_caller = True


class Closed(PhotonError):
    """The program's own `LLM` was closed, before the call or during it."""

    reason = "CLOSED"


class StartupError(PhotonError):
    """The service cannot start."""

    reason = "STARTUP"


class ConfigError(StartupError):
    reason = "CONFIG"


class ModelLoadError(StartupError):
    reason = "MODEL_LOAD"


def _leaves(cls: type[PhotonError]) -> list[type[PhotonError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _leaves(child))]


_BY_REASON = {cls.reason: cls for cls in _leaves(PhotonError) if "reason" in vars(cls)} | {
    "INTERNAL_FAILURE": InternalFailure
}


def reasons_of(*groups: type[PhotonError]) -> tuple[str, ...]:
    """Those of all members here, and of the groups themselves, without repetition; clients define more."""
    members = [cls for group in groups for cls in _leaves(group) if cls.__module__ == __name__]
    return tuple(dict.fromkeys(cls.reason for cls in members))


def from_reason(
    reason: str,
    message: str,
    *,
    field: str = "",
    needed: int | None = None,
    limit: int | None = None,
    retry_after_s: float | None = None,
) -> PhotonError:
    """Return the error that `reason` names, rebuilt on the other side of a process boundary."""
    cls = _BY_REASON.get(reason, InternalFailure)
    return cls(message, field=field, needed=needed, limit=limit, retry_after_s=retry_after_s)


def frames_of(error: BaseException) -> str:
    """Frames of an unforeseen exception, for the log: at most 30 lines, without its text, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    left_out = len(frames) - _FIRST_FRAMES - _LAST_FRAMES
    if left_out <= 0:
        return "".join(traceback.format_list(frames)).rstrip()
    told = [*frames[:_FIRST_FRAMES], *frames[-_LAST_FRAMES:]]
    lines = traceback.format_list(told)
    lines.insert(_FIRST_FRAMES, f"  ... {left_out} frames ...\n")
    return "".join(lines).rstrip()
