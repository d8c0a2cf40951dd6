"""ErrorReason, the classes of errors.py, their status codes and docs/api.md name the same reasons."""

from __future__ import annotations

import re
from pathlib import Path

from photon_grpc import errors
from photon_grpc.client import Unreachable, reason_of
from photon_grpc.server.calls.status import code_of
from photon_grpc.v1 import errors_pb2

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "ERROR_REASON_"
#: Reasons of failures of which no more is known; no server sends them.
GROUPS = (errors.RequestError, errors.NotAllowed, errors.Overloaded, errors.Unavailable)


def subclasses(cls: type[errors.PhotonError]) -> set[type[errors.PhotonError]]:
    children = [child for child in cls.__subclasses__() if child.__module__ == errors.__name__]
    return {cls}.union(*map(subclasses, children))


SENT = {
    cls.reason: code_of(cls("x")).name
    for cls in subclasses(errors.RequestError) | subclasses(errors.Unavailable)
    if cls not in GROUPS
}


def test_the_enum_has_every_reason_that_a_server_sends_with_its_code() -> None:
    proto = (ROOT / "protos/photon_grpc/v1/errors.proto").read_text(encoding="utf-8")
    values = re.findall(rf"^  // ([A-Z_]+): [^\n]+\n(?:  //[^\n]+\n)*  {PREFIX}(\w+) = \d+;", proto, re.MULTILINE)
    assert {reason: code for code, reason in values} == SENT
    assert {f"{PREFIX}{reason}" for reason in (*SENT, "UNSPECIFIED")} == set(errors_pb2.ErrorReason.keys())


def test_the_table_of_errors_has_every_reason_with_its_code() -> None:
    guide = (ROOT / "docs/api.md").read_text(encoding="utf-8").split("## Errors")[1].split("\n## ")[0]
    rows = re.findall(r"^\|[^|]*\| `([A-Z_]+)` \|([^|]*)\|", guide, re.MULTILINE)
    told = {(reason, code) for code, reasons in rows for reason in re.findall(r"`([A-Z_]+)`", reasons)}
    assert told == set(SENT.items())


def test_an_errors_reason_is_a_constant() -> None:
    assert reason_of(errors.QueueFull("full")) == errors_pb2.ERROR_REASON_QUEUE_FULL
    for reason in SENT:
        assert reason_of(errors.from_reason(reason, "x")) == errors_pb2.ErrorReason.Value(f"{PREFIX}{reason}")
    newer = errors.InvalidRequest("x")
    newer.reason = "PROMPT_IN_AN_UNKNOWN_SCRIPT"
    for error in (newer, Unreachable("x"), errors.Overloaded("x")):
        assert reason_of(error) == errors_pb2.ERROR_REASON_UNSPECIFIED
