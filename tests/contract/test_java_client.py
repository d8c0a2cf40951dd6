"""Java's client has Python's errors and options and the server's version. The checks need no Java."""

from __future__ import annotations

import re
from pathlib import Path

import photon_grpc
from photon_grpc import errors
from photon_grpc.client import MessageMismatch, Options, Unreachable, WrongMessageType
from photon_grpc.v1 import errors_pb2

ROOT = Path(__file__).resolve().parents[2]
JAVA = ROOT / "clients" / "java"
SOURCES = JAVA / "src" / "main" / "java" / "io" / "photon" / "grpc"

#: Errors of the Python program that no client has.
NOT_OF_CLIENTS = {"StartupError", "ConfigError", "ModelLoadError"}
#: Errors that occur only in clients.
OF_CLIENTS = (MessageMismatch, WrongMessageType, Unreachable)
#: Options that are arguments of the call in Java.
NOT_OF_REQUESTS = {"message_type"}


def tree(cls: type[errors.PhotonError]) -> dict[str, str]:
    known = {child.__name__: cls.__name__ for child in cls.__subclasses__()}
    for child in cls.__subclasses__():
        known |= tree(child)
    return known


def test_errors_are_named_as_in_python() -> None:
    source = (SOURCES / "PhotonException.java").read_text()
    theirs = dict(re.findall(r"public static class (\w+) extends (\w+) \{", source))
    ours = {name: parent for name, parent in tree(errors.PhotonError).items() if name in vars(errors)}
    ours |= {cls.__name__: cls.__bases__[0].__name__ for cls in OF_CLIENTS}
    ours = {name: parent for name, parent in ours.items() if name not in NOT_OF_CLIENTS}
    ours = {name: "PhotonException" if parent == "PhotonError" else parent for name, parent in ours.items()}
    assert theirs == ours


def test_every_class_has_the_reason_of_python() -> None:
    source = (SOURCES / "PhotonException.java").read_text()
    theirs = {name: reason for reason, name in re.findall(r'Map\.entry\("([A-Z_]+)", (\w+)::new\)', source)}
    # No server sends it.
    theirs |= dict.fromkeys(["MessageMismatch"], *re.findall(r'"(MESSAGE_[A-Z]+)"', source))
    theirs |= dict.fromkeys(["WrongMessageType"], *re.findall(r'"(WRONG_[A-Z_]+)"', source))
    names = {name for name in tree(errors.PhotonError).keys() - NOT_OF_CLIENTS if name in vars(errors)}
    classes = [*(getattr(errors, name) for name in names), *OF_CLIENTS]
    assert theirs == {cls.__name__: cls.reason for cls in classes}


def test_every_reason_of_the_api_has_a_class() -> None:
    source = (SOURCES / "PhotonException.java").read_text()
    theirs = set(re.findall(r'Map\.entry\("([A-Z_]+)", \w+::new\)', source))
    values = errors_pb2.ErrorReason.keys()
    assert {value.removeprefix("ERROR_REASON_") for value in values} - {"UNSPECIFIED"} <= theirs


def test_options_are_named_as_in_python() -> None:
    source = (SOURCES / "Request.java").read_text()
    setters = set(re.findall(r"public Request (\w+)\(", source))
    for name in set(Options.__annotations__) - NOT_OF_REQUESTS:
        camel = re.sub(r"_(\w)", lambda letter: letter.group(1).upper(), name)
        assert camel in setters


def test_versions_move_together() -> None:
    for pom in (JAVA / "pom.xml", JAVA / "examples" / "pom.xml"):
        versions = dict(
            re.findall(r"<artifactId>(photon-grpc-\w+)</artifactId>.*?<version>([^<]+)<", pom.read_text(), re.DOTALL)
        )
        assert set(versions.values()) == {photon_grpc.__version__}
    assert f"<version>{photon_grpc.__version__}</version>" in (JAVA / "README.md").read_text()


def test_the_readmes_and_examples_of_all_languages_have_one_outline() -> None:
    readmes = [ROOT / "clients" / language / "README.md" for language in ("go", "java", "python")]
    go, java, python = [re.findall(r"^## (.*)$", readme.read_text(), re.MULTILINE) for readme in readmes]
    assert java == go == python
    examples = {path.stem.lower() for path in (JAVA / "examples" / "src" / "main" / "java").glob("*.java")}
    assert examples == {path.parent.name for path in (ROOT / "clients" / "go" / "examples").glob("*/main.go")}
