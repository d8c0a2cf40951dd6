"""Go's client agrees with the protos and the other clients. The checks need no Go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from photon_grpc import errors
from photon_grpc.admin.v1 import admin_pb2
from photon_grpc.client import Options
from photon_grpc.client.message_type import MessageMismatch
from photon_grpc.client.status import Unreachable
from photon_grpc.v1 import annotations_pb2, errors_pb2, inference_pb2, model_pb2

ROOT = Path(__file__).resolve().parents[2]
GO = ROOT / "clients" / "go"

SIMPLE = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34}


def unquoted(literal: str) -> bytes:
    """Return the bytes of a Go string, given the text between its quotes."""
    found = bytearray()
    for escape, plain in re.findall(r"\\(x..|u....|U........|.)|([^\\]+)", literal, re.DOTALL):
        if plain:
            found += plain.encode()
        elif escape[0] == "x":
            found.append(int(escape[1:], 16))
        elif escape[0] in "uU":
            found += chr(int(escape[1:], 16)).encode()
        else:
            found.append(SIMPLE[escape])
    return bytes(found)


def forget_json_names(messages: Iterable[DescriptorProto]) -> None:
    """Clear the JSON names, which compilers derive from the fields' names, and only for plugins."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        forget_json_names(message.nested_type)


MODULES = [annotations_pb2, errors_pb2, inference_pb2, model_pb2, admin_pb2]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_stubs_are_of_the_protos_in_git(module: object) -> None:
    """Their descriptor equals the one in Python's stubs, which another test regenerates."""
    wanted = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(wanted)  # type: ignore[attr-defined]
    stub = GO / ("photonadminv1" if "admin" in wanted.package else "photonv1") / f"{Path(wanted.name).stem}.pb.go"
    (raw,) = re.findall(r'_rawDesc = ""((?: \+\n\t"(?:[^"\\]|\\.)*")+)', stub.read_text(encoding="utf-8"))
    literals = re.findall(r'"((?:[^"\\]|\\.)*)"', raw)
    found = FileDescriptorProto.FromString(b"".join(map(unquoted, literals)))
    for file in (found, wanted):
        forget_json_names(file.message_type)
        for extension in file.extension:
            extension.ClearField("json_name")
    assert found == wanted


def told(cls: type[errors.PhotonError]) -> list[type[errors.PhotonError]]:
    return [cls, *(each for child in cls.__subclasses__() for each in told(child))]


def reasons_of_the_api() -> set[str]:
    names = errors_pb2.ErrorReason.keys()
    return {name.removeprefix("ERROR_REASON_") for name in names} - {"UNSPECIFIED"}


def test_errors_have_the_names_reasons_and_families_of_python() -> None:
    source = (GO / "photon" / "errors.go").read_text()
    reasons = dict(re.findall(r'^\t(\w+) +Reason = "(\w+)"$', source, re.MULTILINE))
    families = dict(re.findall(r'^\t(\w+): +(\w+|""),$', source.split("var memberOf")[1].split("\n}")[0], re.MULTILINE))
    assert families.keys() == reasons.keys()
    classes = [*told(errors.RequestError), *told(errors.Unavailable)]
    own = (Unreachable, MessageMismatch)
    classes = [cls for cls in classes if cls.__module__ == errors.__name__ or cls in own]
    by_name = {cls.__name__: cls.reason for cls in classes} | {"Closed": "CLOSED"}
    assert by_name.items() <= reasons.items()
    assert set(reasons.values()) == set(by_name.values()) | reasons_of_the_api()
    for cls in classes:
        parent = cls.__bases__[0]
        assert families[cls.__name__] == ('""' if parent is errors.PhotonError else parent.__name__)


def test_options_have_the_names_of_python() -> None:
    source = "".join((GO / "photon" / f"{name}.go").read_text() for name in ("options", "tools", "typed"))
    options = {name.lower() for name in re.findall(r"^func With(\w+)\(", source, re.MULTILINE)}
    assert {name.replace("_", "") for name in Options.__annotations__} <= options


def test_the_six_examples_and_the_headings_are_there() -> None:
    examples = {path.parent.name for path in (GO / "examples").glob("*/main.go")}
    assert examples == {"generate", "stream", "cancel", "chat", "structured", "multiplex"}
    assert re.findall(r"^## (.*)$", (GO / "README.md").read_text(), re.MULTILINE) == [
        "Install",
        "Stream a generation",
        "Errors",
        "Deadlines and cancellation",
        "Retries and resume",
        "TLS and API keys",
        "Sidecar over a Unix socket",
        "Chat",
        "Typed messages",
        "Multiplex",
        "Scores, usage, timing",
        "Trace context",
    ]
