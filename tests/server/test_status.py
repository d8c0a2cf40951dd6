"""Every failure has the code, the reason and the details that the contract names, in at most 4 KiB."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from photon_grpc import errors
from photon_grpc.server.calls.status import DOMAIN, MAX_DETAILS_BYTES, CallStatus, bounded, call_status

Code = grpc.StatusCode

#: The contract's table.
TABLE: list[tuple[type[errors.PhotonError], grpc.StatusCode, str]] = [
    (errors.InvalidRequest, Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
    (errors.MalformedMessage, Code.INVALID_ARGUMENT, "MALFORMED_MESSAGE"),
    (errors.PromptTooLong, Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
    (errors.InvalidConstraint, Code.INVALID_ARGUMENT, "INVALID_CONSTRAINT"),
    (errors.InvalidTemplate, Code.INVALID_ARGUMENT, "INVALID_TEMPLATE"),
    (errors.ModelNotFound, Code.NOT_FOUND, "MODEL_NOT_FOUND"),
    (errors.FeatureNotSupported, Code.UNIMPLEMENTED, "FEATURE_NOT_SUPPORTED"),
    (errors.DuplicateRequestId, Code.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
    (errors.MissingCredentials, Code.UNAUTHENTICATED, "MISSING_CREDENTIALS"),
    (errors.InvalidCredentials, Code.UNAUTHENTICATED, "INVALID_CREDENTIALS"),
    (errors.ScopeRequired, Code.PERMISSION_DENIED, "SCOPE_REQUIRED"),
    (errors.QueueFull, Code.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (errors.QueueTimeout, Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT"),
    (errors.QuotaExceeded, Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"),
    (errors.KVCapacity, Code.FAILED_PRECONDITION, "KV_CAPACITY"),
    (errors.DescriptorSetUnknown, Code.FAILED_PRECONDITION, "DESCRIPTOR_SET_UNKNOWN"),
    (errors.AnswerIncomplete, Code.FAILED_PRECONDITION, "ANSWER_INCOMPLETE"),
    (errors.AnswerInvalid, Code.FAILED_PRECONDITION, "ANSWER_INVALID"),
    (errors.DeadlineUnreachable, Code.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE"),
    (errors.DeadlinePassed, Code.DEADLINE_EXCEEDED, "DEADLINE_PASSED"),
    (errors.ModelLoading, Code.UNAVAILABLE, "MODEL_LOADING"),
    (errors.Draining, Code.UNAVAILABLE, "DRAINING"),
    (errors.EngineRestarting, Code.UNAVAILABLE, "ENGINE_RESTARTING"),
    (errors.EngineFailure, Code.UNAVAILABLE, "ENGINE_FAILURE"),
    (errors.IdleStreamEvicted, Code.UNAVAILABLE, "IDLE_STREAM_EVICTED"),
    (errors.RequestQuarantined, Code.INTERNAL, "REQUEST_QUARANTINED"),
    (errors.NumericFailure, Code.INTERNAL, "NUMERIC_FAILURE"),
    (errors.InternalFailure, Code.INTERNAL, "INTERNAL_FAILURE"),
    (errors.AbortedByAdmin, Code.ABORTED, "ABORTED_BY_ADMIN"),
    (errors.Cancelled, Code.CANCELLED, "CANCELLED"),
]


def trailer(status: CallStatus, key: str) -> str | bytes | None:
    return dict(status.trailers).get(key)


def parsed(status: CallStatus) -> status_pb2.Status:
    return status_pb2.Status.FromString(trailer(status, "grpc-status-details-bin"))


def detail(status: CallStatus, kind: type) -> object | None:
    for packed in parsed(status).details:
        message = kind()
        if packed.Unpack(message):
            return message
    return None


def leaves(cls: type[errors.PhotonError]) -> set[type[errors.PhotonError]]:
    # Classes that the client derives, if its module has been imported, are never sent by a server.
    children = [child for child in cls.__subclasses__() if child.__module__ == errors.__name__]
    return set().union(*(leaves(child) for child in children)) if children else {cls}


@pytest.mark.parametrize(("cls", "code", "reason"), TABLE, ids=[row[2] for row in TABLE])
def test_code_reason_and_domain_match_the_contract(
    cls: type[errors.PhotonError], code: grpc.StatusCode, reason: str
) -> None:
    status = call_status(cls("what happened"), "r1")
    assert (status.code, status.text, status.reason) == (code, "what happened", reason)
    assert (parsed(status).code, parsed(status).message) == (code.value[0], "what happened")
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == (reason, DOMAIN) == (reason, "photon-grpc")
    assert trailer(status, "x-request-id") == "r1"


def test_grpc_does_not_retry_an_evicted_idle_stream() -> None:
    status = call_status(errors.IdleStreamEvicted("idle", limit=64), "r1")
    assert trailer(status, "grpc-retry-pushback-ms") == "-1"


def test_the_table_has_every_error_that_a_caller_can_meet() -> None:
    tested = {row[0] for row in TABLE}
    assert leaves(errors.RequestError) | leaves(errors.Unavailable) <= tested


def test_a_bad_field_is_named_with_its_path() -> None:
    status = call_status(errors.InvalidRequest("must be finite", field="sampling.temperature"), "r1")
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("sampling.temperature", "must be finite")


def test_both_numbers_are_in_the_details() -> None:
    status = call_status(errors.PromptTooLong("too long", field="text", needed=5000, limit=4096), "r1")
    info = detail(status, error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"field": "text", "needed": "5000", "limit": "4096"}


def test_a_missing_feature_is_named() -> None:
    info = detail(call_status(errors.FeatureNotSupported("no", field="chat"), "r"), error_details_pb2.ErrorInfo)
    assert info.metadata["feature"] == "FEATURE_CHAT"


@pytest.mark.parametrize("cls", [row[0] for row in TABLE if row[1] is Code.RESOURCE_EXHAUSTED])
def test_overload_gives_the_retry_delay_in_both_places(cls: type[errors.PhotonError]) -> None:
    status = call_status(cls("full", retry_after_s=2.5), "r1")
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 2500
    assert trailer(status, "grpc-retry-pushback-ms") == "2500"
    # There is an answer even without a measured rate.
    assert int(trailer(call_status(cls("full"), "r1"), "grpc-retry-pushback-ms")) > 0


@pytest.mark.parametrize("cls", [row[0] for row in TABLE if row[1] is Code.UNAVAILABLE])
def test_unavailable_gives_a_retry_delay(cls: type[errors.PhotonError]) -> None:
    assert detail(call_status(cls("later"), "r1"), error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    # The client's own back-off applies unless the server knows better.
    if cls is errors.IdleStreamEvicted:
        return  # gRPC must not reopen it
    assert trailer(call_status(cls("later", retry_after_s=None), "r1"), "grpc-retry-pushback-ms") is None
    assert trailer(call_status(cls("later", retry_after_s=0.1), "r1"), "grpc-retry-pushback-ms") == "100"


def test_final_failures_give_no_retry_delay() -> None:
    status = call_status(errors.KVCapacity("never fits", needed=10, limit=4), "r1")
    assert detail(status, error_details_pb2.RetryInfo) is None
    assert trailer(status, "grpc-retry-pushback-ms") is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("secret prompt"),
        errors.ModelLoadError("/secret/path"),
        errors.ConfigError("secret"),
        KeyError("secret"),
    ],
)
def test_internal_details_are_not_sent_to_callers(error: Exception) -> None:
    status = call_status(error, "r-42")
    assert status.code is Code.INTERNAL
    assert "r-42" in status.text
    assert "secret" not in status.text
    assert b"secret" not in trailer(status, "grpc-status-details-bin")


@pytest.mark.parametrize("character", ["x", "é", "🦊", "\ud800", "\n"])
def test_details_stay_small_with_many_violations_and_long_texts(character: str) -> None:
    error = errors.InvalidConstraint(character * 100_000, field=character * 10_000, needed=2**63, limit=2**63)
    error.also = tuple((f"stop.stop_strings[{i}]", "must not be empty " * 100) for i in range(1000))
    status = call_status(error, "r" * 128)
    assert len(trailer(status, "grpc-status-details-bin")) <= MAX_DETAILS_BYTES == 4096
    assert len(status.text.encode()) <= 512
    assert parsed(status).message == status.text
    assert detail(status, error_details_pb2.ErrorInfo).reason == "INVALID_CONSTRAINT"
    assert detail(status, error_details_pb2.BadRequest).field_violations


def test_short_violations_are_all_reported_while_they_fit() -> None:
    error = errors.InvalidRequest("first", field="a")
    error.also = tuple((f"f{i}", "bad") for i in range(20))
    assert len(detail(call_status(error, "r"), error_details_pb2.BadRequest).field_violations) == 21


def test_details_of_unknown_kinds_are_dropped_from_the_end() -> None:
    status = status_pb2.Status(code=3)
    for size in (100, 5000):
        status.details.add(type_url="type.googleapis.com/x", value=b"x" * size)
    assert [len(packed.value) for packed in bounded(status).details] == [100]
