"""An error that crosses a process boundary is the same error on the other side."""

from __future__ import annotations

import msgspec
import pytest

from photon_grpc import errors
from photon_grpc.core.fault import Fault
from photon_grpc.core.frames import Failed


def leaves(cls: type[errors.PhotonError]) -> list[type[errors.PhotonError]]:
    """Those of `errors` alone: a client has one more, which never crosses."""
    children = [child for child in cls.__subclasses__() if child.__module__ == errors.__name__]
    return [leaf for child in children for leaf in leaves(child)] or [cls]


@pytest.mark.parametrize("is_final", [False, True])
@pytest.mark.parametrize("cls", [*leaves(errors.PhotonError), errors.DeadlinePassed], ids=lambda cls: cls.__name__)
def test_every_error_comes_back_as_itself(cls: type[errors.PhotonError], is_final: bool) -> None:
    error = cls("why", field="stop.max_tokens", needed=5, limit=4, retry_after_s=0.5)
    if is_final:
        error.is_final = True
    wire = msgspec.msgpack.encode(Failed.of(7, error))
    failed = msgspec.msgpack.decode(wire, type=Failed)
    back = failed.fault.error()
    assert failed.handle == 7 and type(back) is cls and vars(back) == vars(error) and str(back) == "why"


def test_a_reason_of_another_build_is_an_internal_failure() -> None:
    assert type(Fault("A_REASON_OF_TOMORROW", "why").error()) is errors.InternalFailure
