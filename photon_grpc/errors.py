"""Every failure that a caller, an operator or another process of the service can meet.

    PhotonError
    ├── RequestError                   REQUEST_ERROR           one request is refused or fails; others are unaffected
    │   ├── InvalidRequest             INVALID_REQUEST         a field is wrong; `field` names it
    │   │   ├── MalformedMessage       MALFORMED_MESSAGE       bytes that cannot be parsed as a message
    │   │   ├── PromptTooLong          PROMPT_TOO_LONG         needed and limit, in tokens
    │   │   ├── InvalidConstraint      INVALID_CONSTRAINT      structured output that cannot be compiled or met
    │   │   └── InvalidTemplate        INVALID_TEMPLATE        the chat template failed; the line
    │   ├── ModelNotFound              MODEL_NOT_FOUND
    │   ├── FeatureNotSupported        FEATURE_NOT_SUPPORTED   which one, and the field that requested it
    │   ├── DuplicateRequestId         DUPLICATE_REQUEST_ID
    │   ├── NotAllowed                 NOT_ALLOWED
    │   │   ├── MissingCredentials     MISSING_CREDENTIALS
    │   │   ├── InvalidCredentials     INVALID_CREDENTIALS
    │   │   └── ScopeRequired          SCOPE_REQUIRED
    │   ├── Overloaded                 OVERLOADED              retry after `retry_after_s`
    │   │   ├── QueueFull              QUEUE_FULL
    │   │   ├── QueueTimeout           QUEUE_TIMEOUT
    │   │   └── QuotaExceeded          QUOTA_EXCEEDED
    │   ├── KVCapacity                 KV_CAPACITY             needed and limit, in blocks
    │   ├── DescriptorSetUnknown       DESCRIPTOR_SET_UNKNOWN  this replica has no set with the digest: send the set
    │   ├── AnswerIncomplete           ANSWER_INCOMPLETE       the answer of a service was cut before it was a message
    │   ├── AnswerInvalid              ANSWER_INVALID          the answer of a service breaks a rule of its message
    │   ├── DeadlinePassed             DEADLINE_PASSED
    │   │   └── DeadlineUnreachable    DEADLINE_UNREACHABLE    refused before the deadline, which it could not meet
    │   ├── NumericFailure             NUMERIC_FAILURE         NaN logits
    │   ├── RequestQuarantined         REQUEST_QUARANTINED     it crashed the engine twice
    │   ├── AbortedByAdmin             ABORTED_BY_ADMIN
    │   ├── Cancelled                  CANCELLED               by its caller, on a multiplexed stream
    │   └── InternalFailure            INTERNAL_FAILURE        a defect of the server, reported without internals
    ├── Unavailable                    UNAVAILABLE             cannot serve now; retry after `retry_after_s`
    │   ├── ModelLoading               MODEL_LOADING
    │   ├── Draining                   DRAINING
    │   ├── EngineRestarting           ENGINE_RESTARTING       nothing was sent yet: retry
    │   ├── EngineFailure              ENGINE_FAILURE          output had begun: continue from it
    │   └── IdleStreamEvicted          IDLE_STREAM_EVICTED     an idle stream was closed for another: open it again
    ├── Closed                         CLOSED                  the LLM was closed, before the call or during it
    └── StartupError                   the service cannot start; the message has the remedy, the exit code is 2
        ├── ConfigError                a flag or PHOTON_ variable
        └── ModelLoadError             a file of the model directory; names the tensor or the key

An error carries what was requested and what is possible (`needed`, `limit`, in the unit that the message names; the
limit of a value that is too small is the least one). The reason of a group (REQUEST_ERROR, NOT_ALLOWED, OVERLOADED,
UNAVAILABLE) is for failures of which no more is known, such as those of a proxy; the server itself gives the reason of
a member. Status codes belong to `server`.
"""

from __future__ import annotations

import traceback
from typing import Any

#: A caller's retry delay if nothing better is known.
RETRY_AFTER_S = 1.0
#: Frames of a traceback that are logged, at its beginning and its end.
_FIRST_FRAMES = 4
_LAST_FRAMES = 5


class PhotonError(Exception):
    """The base of all failures; `str(error)` is fit for the caller: no path, prompt, class or stack of the server."""

    reason = "INTERNAL_FAILURE"
    #: A retry cannot succeed, or not before the caller's deadline.
    is_final = False
    #: The caller may retry with its next request; gRPC itself must not.
    is_left_to_caller = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        needed: float | None = None,
        limit: float | None = None,
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
    #: False: the release does not know the field, whatever the model has.
    is_of_model = True


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
    """There is no room now; retry after `retry_after_s`."""

    reason = "OVERLOADED"


class QueueFull(Overloaded):
    reason = "QUEUE_FULL"


class QueueTimeout(Overloaded):
    reason = "QUEUE_TIMEOUT"


class QuotaExceeded(Overloaded):
    reason = "QUOTA_EXCEEDED"


class KVCapacity(RequestError):
    reason = "KV_CAPACITY"


class DescriptorSetUnknown(RequestError):
    """The replica does not hold the descriptor set that a digest stands for; send the set itself."""

    reason = "DESCRIPTOR_SET_UNKNOWN"


class AnswerIncomplete(RequestError):
    """The answer to a method of a caller's service ended before its message was complete."""

    reason = "ANSWER_INCOMPLETE"


class AnswerInvalid(RequestError):
    """The answer to a method of a caller's service breaks a rule of its message that no grammar holds."""

    reason = "ANSWER_INVALID"


class DeadlinePassed(RequestError):
    reason = "DEADLINE_PASSED"


class DeadlineUnreachable(DeadlinePassed):
    """The deadline would pass; a kind of DeadlinePassed, so that one handler catches both."""

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
    #: The default message and retry delay.
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
    """An idle stream was closed; reopen it with the next request, since idle streams would evict each other."""

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
    """Return the reasons of these groups and of their members in this module, each once; clients define more."""
    members = [cls for group in groups for cls in _leaves(group) if cls.__module__ == __name__]
    return tuple(dict.fromkeys(cls.reason for cls in members))


def from_reason(
    reason: str,
    message: str,
    *,
    field: str = "",
    needed: float | None = None,
    limit: float | None = None,
    retry_after_s: float | None = None,
) -> PhotonError:
    """Return the error that `reason` names, rebuilt on the other side of a process boundary."""
    cls = _BY_REASON.get(reason, InternalFailure)
    return cls(message, field=field, needed=needed, limit=limit, retry_after_s=retry_after_s)


def frames_of(error: BaseException) -> str:
    """Return at most 30 lines of an exception's traceback for the log, without its text, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    left_out = len(frames) - _FIRST_FRAMES - _LAST_FRAMES
    if left_out <= 0:
        return "".join(traceback.format_list(frames)).rstrip()
    lines = traceback.format_list([*frames[:_FIRST_FRAMES], *frames[-_LAST_FRAMES:]])
    lines.insert(_FIRST_FRAMES, f"  ... {left_out} frames ...\n")
    return "".join(lines).rstrip()
