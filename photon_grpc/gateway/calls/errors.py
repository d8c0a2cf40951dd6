"""The only place where a failure becomes an HTTP status, headers and a body, in the form of each API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec

from photon_grpc import errors
from photon_grpc.observe.codes import code_name, public_error

#: The mapping of google.rpc.Code, except that a model that lacks a feature is no failure of the server.
_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNIMPLEMENTED": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: The status of a caller that went away, as nginx logs it.
CLIENT_CLOSED = 499
#: Characters of an error's text and field.
_MAX_TEXT, _MAX_FIELD = 2048, 256

Headers = dict[str, str]


class HttpError(errors.InvalidRequest):
    """A request that is wrong as HTTP, whichever fields its body has."""

    def __init__(
        self, status: HTTPStatus, message: str, *, reason: str = "", headers: Headers | None = None, **facts: Any
    ) -> None:
        """Take what PhotonError takes, and a reason that only HTTP has."""
        super().__init__(message, **facts)
        self.reason = reason or self.reason
        self.status = status
        self.headers = headers or {}


class Failure(NamedTuple):
    """The end of a failed call."""

    error: errors.PhotonError
    status: int
    request_id: str
    #: As the API names it; empty for none.
    field: str
    message: str

    @property
    def code_name(self) -> str:
        return str(self.status)

    @property
    def reason(self) -> str:
        return self.error.reason

    def headers(self) -> Headers:
        """Return the headers that tell clients whether and when to try again."""
        found = dict(getattr(self.error, "headers", {}))
        is_retryable = isinstance(self.error, (errors.Overloaded, errors.Unavailable)) and not self.error.is_final
        # Clients of OpenAI and Anthropic would also repeat what fails again: 409, 500, 504.
        found["x-should-retry"] = "true" if is_retryable else "false"
        if is_retryable:
            delay_s = errors.RETRY_AFTER_S if self.error.retry_after_s is None else max(self.error.retry_after_s, 0.0)
            found["retry-after"] = str(math.ceil(delay_s))
            found["retry-after-ms"] = str(round(delay_s * 1000))
        if self.status == HTTPStatus.UNAUTHORIZED:
            found["www-authenticate"] = "Bearer"
        return found


def failure_of(error: Exception, request_id: str, names: Mapping[str, str]) -> Failure:
    """Return the failure with the API's `names` of fields. The text of an internal exception is left out."""
    public = public_error(error, request_id)
    status = error.status if isinstance(error, HttpError) else _STATUSES[code_name(public)]
    return Failure(public, int(status), request_id, *_renamed(public, names))


def _renamed(error: errors.PhotonError, names: Mapping[str, str]) -> tuple[str, str]:
    """Return the API's name of the error's field, and the message with it. Others may hold the same error."""
    path, message = error.field, error.message
    ours = path
    while ours and ours not in names:
        ours = ours[: max(ours.rfind("."), ours.rfind("["), 0)]
    if not ours:
        return path, message
    field = names[ours] + path[len(ours) :]
    return field, field + message[len(path) :] if message.startswith(path) else message


class ErrorForm(Protocol):
    """The form of errors in one API."""

    def body(self, failure: Failure) -> bytes: ...

    def event(self, failure: Failure) -> bytes:
        """Return the server-sent event of a failure after output began."""

    def headers(self, request_id: str) -> Headers:
        """Return the headers of every answer."""


class OpenAiErrors:
    """`{"error": {"message", "type", "param", "code"}}`, where `code` is our reason."""

    def body(self, failure: Failure) -> bytes:
        return msgspec.json.encode({"error": self.fields(failure)})

    def event(self, failure: Failure) -> bytes:
        return b"data: " + self.body(failure) + b"\n\n"

    def headers(self, request_id: str) -> Headers:
        return {"x-request-id": request_id}

    def fields(self, failure: Failure) -> dict[str, Any]:
        """Return the error without what is around it."""
        status = failure.status
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"type": kind} | _facts(failure)


class AnthropicErrors:
    """`{"type": "error", "error": {"type", "message", "code"}, "request_id"}`, where `code` is our reason."""

    def body(self, failure: Failure) -> bytes:
        whole = {"type": "error", "error": self._fields(failure), "request_id": failure.request_id}
        return msgspec.json.encode(whole)

    def event(self, failure: Failure) -> bytes:
        return b"event: error\ndata: " + self.body(failure) + b"\n\n"

    def headers(self, request_id: str) -> Headers:
        return {"request-id": request_id, "x-request-id": request_id}

    def _fields(self, failure: Failure) -> dict[str, Any]:
        status = failure.status
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": kind} | _facts(failure)


OPENAI_ERRORS = OpenAiErrors()
ANTHROPIC_ERRORS = AnthropicErrors()


def _facts(failure: Failure) -> dict[str, Any]:
    """Return the parts of an error that all forms have."""
    error = failure.error
    numbers = {"needed": error.needed, "limit": error.limit}
    return {
        "message": failure.message[:_MAX_TEXT],
        "param": failure.field[:_MAX_FIELD] or None,
        "code": error.reason,
    } | {name: number for name, number in numbers.items() if number is not None}
