"""Conversion of a gRPC status and its details back into the exceptions of `photon_grpc.errors`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from photon_grpc import errors
from photon_grpc.v1 import errors_pb2

DOMAIN = "photon-grpc"
_REASONS = dict(errors_pb2.ErrorReason.items())
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
#: gRPC's text if health checks find no ready server.
_NONE_IS_READY = "backend unhealthy"
#: Its texts before the reason for a failed connection, and before the TLS library's error.
_CONNECTING = "last error: "
_TLS_ERROR = "OPENSSL_internal:"
#: Its texts for a failed handshake, unusable TLS files, and a certificate with another name.
_NO_HANDSHAKE = ("handshake failed", "security handshaker", "peer certificate", "Hostname Verification")
#: Its text for an answer that is not HTTP/2.
_NO_HTTP2 = "Failed parsing HTTP/2"
#: Its text for a message above the receiver's limit.
_TOO_LARGE = "larger than max"
#: Its texts for a connection that ends during a call.
_LOST = ("Socket closed", "Stream removed", "Connection reset", "Broken pipe")

M = TypeVar("M", bound=Message)

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Unreachable(errors.Unavailable):
    """No server answered at the target, none is ready, or the connection was lost."""

    reason = "UNREACHABLE"
    #: The connection was lost during the call, not before it.
    was_lost = False
    #: Something at the target answered: a server that is not ready or ended the connection, or another program.
    is_answered = False
    #: The target of the call.
    target = ""


#: Errors for a status without our details, which came from gRPC itself, a proxy or another server.
_BY_CODE: dict[grpc.StatusCode, type[errors.PhotonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFound,
    grpc.StatusCode.UNIMPLEMENTED: errors.FeatureNotSupported,
    grpc.StatusCode.ALREADY_EXISTS: errors.DuplicateRequestId,
    grpc.StatusCode.UNAUTHENTICATED: errors.InvalidCredentials,
    grpc.StatusCode.PERMISSION_DENIED: errors.ScopeRequired,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.CANCELLED: Unreachable,
}


#: The groups of reasons that this release does not know, by the status that our server sent.
_GROUPS: dict[grpc.StatusCode, type[errors.PhotonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: errors.FeatureNotSupported,
    grpc.StatusCode.UNAUTHENTICATED: errors.NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: errors.NotAllowed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.INTERNAL: errors.InternalFailure,
    grpc.StatusCode.UNKNOWN: errors.InternalFailure,
    grpc.StatusCode.DATA_LOSS: errors.InternalFailure,
}


def to_error(failure: grpc.aio.AioRpcError, target: str) -> errors.PhotonError:
    """Return the exception to raise for a failed call; chain it: `raise to_error(failure, target) from failure`."""
    trailers = dict(iter(failure.trailing_metadata() or ()))
    details = _details(trailers.get(_DETAILS_KEY))
    error = _rebuilt(failure.code(), failure.details() or "", details, _retry_after_s(details, trailers), target)
    error.is_final = _is_final(trailers)
    return error


def reason_of(error: errors.PhotonError) -> errors_pb2.ErrorReason.ValueType:
    """Return the reason of an error as a constant of the enum; UNSPECIFIED if the enum of this release lacks it."""
    return _REASONS.get(f"ERROR_REASON_{error.reason}", errors_pb2.ERROR_REASON_UNSPECIFIED)


def item_error(failure: status_pb2.Status, target: str) -> errors.PhotonError:
    """Return the exception to raise for a failed request of a multiplexed stream."""
    code = _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)
    return _rebuilt(code, failure.message, failure.details, _retry_after_s(failure.details, {}), target)


def _rebuilt(
    code: grpc.StatusCode, message: str, details: Iterable[Any], retry_after_s: float | None, target: str
) -> errors.PhotonError:
    info = _find(details, error_details_pb2.ErrorInfo())
    if info is None or info.domain != DOMAIN:
        return _foreign(code, message, target, retry_after_s)
    error = errors.from_reason(
        info.reason,
        message,
        field=_field(details) or info.metadata.get("field", ""),
        needed=_number(info.metadata.get("needed"), float),
        limit=_number(info.metadata.get("limit"), float),
        retry_after_s=retry_after_s,
    )
    return error if error.reason == info.reason else _newer(code, info.reason, error)


def _newer(code: grpc.StatusCode, reason: str, read: errors.PhotonError) -> errors.PhotonError:
    """Return the error of a newer server's reason: the status determines the class; reason and facts are kept."""
    cls = _GROUPS.get(code, errors.RequestError)
    facts = {name: getattr(read, name) for name in ("field", "needed", "limit", "retry_after_s")}
    error = cls(read.message, **facts)
    error.reason = reason
    return error


def _foreign(code: grpc.StatusCode, message: str, target: str, retry_after_s: float | None) -> errors.PhotonError:
    cls = _BY_CODE.get(code, errors.InternalFailure)
    if cls is Unreachable:
        return _unreachable(message, target, retry_after_s)
    if cls is errors.Overloaded and _TOO_LARGE in message:
        return errors.InvalidRequest(message)
    if cls is errors.DeadlinePassed:
        return cls("the deadline has passed")
    return cls(message or code.name, retry_after_s=retry_after_s)


def _unreachable(message: str, target: str, retry_after_s: float | None) -> Unreachable:
    if message.endswith(_NONE_IS_READY):
        text = f"no server at {target} is ready: it loads its model, drains or starts again"
    else:
        text = f"no answer from {target} ({_cause(message)})"
    error = Unreachable(text, retry_after_s=retry_after_s)
    error.was_lost, error.target = any(each in message for each in _LOST), target
    error.is_answered = error.was_lost or any(each in message for each in (_NONE_IS_READY, *_NO_HANDSHAKE, _NO_HTTP2))
    return error


def _cause(message: str) -> str:
    """Return the cause in gRPC's nested message: its last part is the error of the system or the TLS library."""
    if _NO_HTTP2 in message:
        return "it does not speak HTTP/2"
    before = _TLS_ERROR if _TLS_ERROR in message else ": "
    cause = message.removesuffix(": OK").rpartition(before)[2].strip("[]")
    is_at_the_start = _CONNECTING in message and cause == "Socket closed"
    if any(each in message for each in _NO_HANDSHAKE):
        return f"the TLS handshake failed: {_handshake_cause(cause)}"
    return f"{cause}; do both sides speak TLS (--tls-ca)?" if is_at_the_start else cause


def _handshake_cause(cause: str) -> str:
    if cause.startswith("WRONG_VERSION_NUMBER"):
        return "it does not speak TLS"
    if cause.startswith("CERTIFICATE_VERIFY_FAILED"):
        return f"its certificate is not trusted, {cause.partition(': ')[2] or 'by --tls-ca'}"
    return cause


def _details(trailer: str | bytes | None) -> list[Any]:
    """Return the Any messages of a google.rpc.Status; none if the trailer is missing or malformed."""
    if not isinstance(trailer, bytes):
        return []
    try:
        return list(status_pb2.Status.FromString(trailer).details)
    except DecodeError:
        return []


def _find(details: Iterable[Any], target: M) -> M | None:
    """Fill `target` from the first detail of its type, and return it; None if there is none."""
    for detail in details:
        if detail.Unpack(target):
            return target
    return None


def _field(details: Iterable[Any]) -> str:
    request = _find(details, error_details_pb2.BadRequest())
    return request.field_violations[0].field if request is not None and request.field_violations else ""


def _retry_after_s(details: Iterable[Any], trailers: Mapping[str, str | bytes]) -> float | None:
    info = _find(details, error_details_pb2.RetryInfo())
    if info is not None:
        return float(info.retry_delay.ToNanoseconds() / 1e9)
    milliseconds = _number(trailers.get(_PUSHBACK_KEY))
    return None if milliseconds is None or milliseconds < 0 else milliseconds / 1e3


def _is_final(trailers: Mapping[str, str | bytes]) -> bool:
    """Return whether the pushback forbids a retry: it is negative or, as gRPC reads it, no number."""
    if _PUSHBACK_KEY not in trailers:
        return False
    milliseconds = _number(trailers[_PUSHBACK_KEY])
    return milliseconds is None or milliseconds < 0


def _number(text: str | bytes | None, of_fraction: type[float] = int) -> float | None:
    try:
        return (of_fraction if "." in str(text) else int)(text) if text else None
    except ValueError:
        return None
