"""The only place where a failure becomes a gRPC status: code, text, google.rpc details and their trailers.

Details and text stay small together, since gRPC replaces the status by RESOURCE_EXHAUSTED if the header list is larger
than 8 KiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import NamedTuple

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from photon_grpc import errors
from photon_grpc.observe.codes import code_name, public_error
from photon_grpc.server.calls import metadata
from photon_grpc.server.wire import features

DOMAIN = "photon-grpc"
#: Serialized google.rpc.Status; base64 makes it 5.4 KiB on the wire.
MAX_DETAILS_BYTES = 4096
#: UTF-8 bytes of a status text; percent-encoding may triple them.
MAX_TEXT_BYTES = 512
_MAX_VALUE_BYTES = 256
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
#: A negative pushback stops gRPC's retries.
_NEVER = "-1"


class CallStatus(NamedTuple):
    """The end of a failed call: the arguments of `context.abort`, and what the log adds to them."""

    code: grpc.StatusCode
    text: str
    trailers: tuple[tuple[str, str | bytes], ...]
    reason: str
    request_id: str

    @property
    def code_name(self) -> str:
        return self.code.name


def call_status(error: Exception, request_id: str) -> CallStatus:
    """Return the status that the caller gets for `error`. The text of an internal exception is left out."""
    public = public_error(error, request_id)
    status = _rpc_status(public)
    trailers: list[tuple[str, str | bytes]] = [
        (_DETAILS_KEY, status.SerializeToString()),
        (metadata.REQUEST_ID_KEY, request_id),
    ]
    if public.is_left_to_caller or public.retry_after_s is not None or isinstance(public, errors.Overloaded):
        is_never = public.is_final or public.is_left_to_caller
        trailers.append((_PUSHBACK_KEY, _NEVER if is_never else str(round(_retry_s(public) * 1000))))
    return CallStatus(code_of(public), status.message, tuple(trailers), public.reason, request_id)


def request_error(error: Exception, request_id: str) -> status_pb2.Status:
    """Return the status for one request of a multiplexed stream."""
    return _rpc_status(public_error(error, request_id))


def _rpc_status(error: errors.PhotonError) -> status_pb2.Status:
    text = _cut(error.message, MAX_TEXT_BYTES)
    return bounded(status_pb2.Status(code=code_of(error).value[0], message=text, details=_packed(_details(error))))


def code_of(error: errors.PhotonError) -> grpc.StatusCode:
    return grpc.StatusCode[code_name(error)]


def bounded(status: status_pb2.Status) -> status_pb2.Status:
    """Drop the last field violations, then the last details, until `status` fits MAX_DETAILS_BYTES."""
    while status.ByteSize() > MAX_DETAILS_BYTES and status.details:
        bad_request = error_details_pb2.BadRequest()
        last = status.details[-1]
        if last.Unpack(bad_request) and len(bad_request.field_violations) > 1:
            # Halving takes few steps, however many there are.
            del bad_request.field_violations[len(bad_request.field_violations) // 2 :]
            last.Pack(bad_request)
        else:
            del status.details[-1]
    return status


def _details(error: errors.PhotonError) -> list[Message]:
    """Return the details, the most useful first, since what does not fit is cut from the end."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_facts(error))
    details: list[Message] = [info]
    is_retryable = isinstance(error, (errors.Overloaded, errors.Unavailable)) and not error.is_final
    if error.retry_after_s is not None or is_retryable:
        delay = Duration()
        delay.FromNanoseconds(round(_retry_s(error) * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, errors.InvalidRequest) and error.field:
        details.append(_bad_request([(error.field, error.message), *error.also]))
    return details


def _facts(error: errors.PhotonError) -> dict[str, str]:
    facts = {"field": _cut(error.field, _MAX_VALUE_BYTES)} if error.field else {}
    if error.needed is not None:
        facts["needed"] = _decimal(error.needed)
    if error.limit is not None:
        facts["limit"] = _decimal(error.limit)
    if isinstance(error, errors.FeatureNotSupported) and error.is_of_model and (f := features.name_of(error.field)):
        facts["feature"] = f
    return facts


def _decimal(number: float) -> str:
    """Return a number without an exponent, which clients of other languages do not read."""
    return _cut(format(Decimal(str(number)), "f"), _MAX_VALUE_BYTES)


def _bad_request(violations: Iterable[tuple[str, str]]) -> error_details_pb2.BadRequest:
    message = error_details_pb2.BadRequest()
    for field, text in violations:
        message.field_violations.add(field=_cut(field, _MAX_VALUE_BYTES), description=_cut(text, MAX_TEXT_BYTES))
    return message


def _packed(details: Iterable[Message]) -> list[Any]:
    packed = []
    for detail in details:
        packed.append(Any())
        packed[-1].Pack(detail)
    return packed


def _retry_s(error: errors.PhotonError) -> float:
    return errors.RETRY_AFTER_S if error.retry_after_s is None else max(error.retry_after_s, 0.0)


def _cut(text: str, num_bytes: int) -> str:
    """Cut `text` to at most `num_bytes` of UTF-8, with an ellipsis if something is left out."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= num_bytes:
        return encoded.decode()
    return encoded[: num_bytes - 3].decode("utf-8", "ignore") + "…"
