"""The outside of a failure: an error fit for callers, and its canonical code (google.rpc.Code)."""

from __future__ import annotations

from photon_grpc import errors

#: The first class in an error's MRO that is a key decides.
CODES: dict[type[errors.PhotonError], str] = {
    errors.InvalidRequest: "INVALID_ARGUMENT",
    errors.ModelNotFound: "NOT_FOUND",
    errors.FeatureNotSupported: "UNIMPLEMENTED",
    errors.DuplicateRequestId: "ALREADY_EXISTS",
    errors.MissingCredentials: "UNAUTHENTICATED",
    errors.InvalidCredentials: "UNAUTHENTICATED",
    errors.NotAllowed: "PERMISSION_DENIED",
    errors.Overloaded: "RESOURCE_EXHAUSTED",
    errors.KVCapacity: "FAILED_PRECONDITION",
    errors.DescriptorSetUnknown: "FAILED_PRECONDITION",
    errors.AnswerIncomplete: "FAILED_PRECONDITION",
    errors.AnswerInvalid: "FAILED_PRECONDITION",
    errors.DeadlinePassed: "DEADLINE_EXCEEDED",
    errors.AbortedByAdmin: "ABORTED",
    errors.Cancelled: "CANCELLED",
    errors.Unavailable: "UNAVAILABLE",
    errors.PhotonError: "INTERNAL",
}


def code_name(error: errors.PhotonError) -> str:
    """Return the name of the canonical code of an error."""
    return next(CODES[cls] for cls in type(error).__mro__ if cls in CODES)


def code_of_reason(reason: str) -> str:
    """Return the name of the canonical code of a request that ended for `reason`; OK for ""."""
    return code_name(errors.from_reason(reason, "")) if reason else "OK"


def public_error(error: Exception, request_id: str) -> errors.PhotonError:
    """Return the error that a caller may see: the text of an unexpected exception, which may quote a prompt, is not."""
    if isinstance(error, errors.PhotonError) and not isinstance(error, errors.StartupError):
        return error
    return errors.InternalFailure(f"internal error; the server's log has it under request id {request_id}")
