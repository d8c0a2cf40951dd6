"""A PhotonError as plain data, for rows of a step, requests over the bridge and jobs of the encoder."""

from __future__ import annotations

import msgspec

from photon_grpc.errors import PhotonError, from_reason


class Fault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of errors.PhotonError; `reason` names the class."""

    reason: str
    message: str
    field: str = ""
    needed: int | float | None = None
    limit: int | float | None = None
    retry_after_s: float | None = None
    is_final: bool = False

    @classmethod
    def of(cls, error: PhotonError) -> Fault:
        return cls(
            error.reason, error.message, error.field, error.needed, error.limit, error.retry_after_s, error.is_final
        )

    def error(self) -> PhotonError:
        """Return the error that `of` was called with; InternalFailure if no class has the reason."""
        error = from_reason(
            self.reason,
            self.message,
            field=self.field,
            needed=self.needed,
            limit=self.limit,
            retry_after_s=self.retry_after_s,
        )
        if self.is_final:
            error.is_final = True
        return error
