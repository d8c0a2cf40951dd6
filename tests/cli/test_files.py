"""Flags that take files: one that is not there is named once, with its flag, and nothing of Python's is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from photon_grpc.cli import main
from photon_grpc.cli.main import cli
from photon_grpc.cli.terminal.connection import TLS_CA, TLS_CERT, TLS_KEY
from photon_grpc.config.resolve import resolve
from photon_grpc.config.settings import settings
from photon_grpc.service.processes import check_start
from tests.client.fake_server import serving_in_a_thread

NOTHING = "/no/such/file"
#: What a verb needs beside its flags to come as far as to its files.
ARGUMENTS = {
    "generate": ["x"],
    "batch": ["IN", "OUT"],
    "health": ["--timeout", "0.1"],
    "top": ["--once"],
    "calibrate": ["/"],
}
SETTINGS = {setting.flag for setting in settings()}


def flags_of_files() -> list[tuple[str, str]]:
    return [
        (verb, each.opts[-1])
        for verb, command in cli.commands.items()
        for each in command.params
        if (each.metavar or "").startswith("FILE") and each.opts[-1] not in SETTINGS and verb not in ("trace", "serve")
    ]


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TLS_CA, TLS_CERT, TLS_KEY):
        monkeypatch.setenv(name, "")  # back to what it was afterwards: flags set them
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("verb", "flag"), flags_of_files(), ids=" ".join)
def test_a_file_that_is_not_there_is_named_once(
    verb: str, flag: str, no_variables: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text('"x"')
    places = {"IN": str(tmp_path / "in"), "OUT": str(tmp_path / "out")}
    arguments = [places.get(each, each) for each in ARGUMENTS.get(verb, [])]
    given = [flag, NOTHING, *(["a.B"] if flag == "--protobuf" else [])]
    if flag in ("--tls-cert", "--tls-key"):
        given = ["--tls-cert", NOTHING, "--tls-key", NOTHING]
    with serving_in_a_thread() as fake:
        has_target = any("--target" in each.opts for each in cli.commands[verb].params)
        target = ["--target", fake.target] if has_target else []
        assert main.main([verb, *arguments, *given, *target]) == 2
    told = capsys.readouterr().err
    assert told.count("/no/such") == 1, told
    assert flag.removesuffix("key").removesuffix("cert") in told and "Errno" not in told


def test_files_that_are_arguments_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text('"x"')
    for call in (
        ["batch", NOTHING, f"{tmp_path}/out"],
        ["batch", f"{tmp_path}/in", f"{NOTHING}/out"],
        ["trace", NOTHING],
        ["convert", NOTHING],
        ["serve", NOTHING],
    ):
        assert main.main(call) == 2, call
        told = capsys.readouterr().err
        assert told.count(NOTHING) == 1 and "Errno" not in told, told


@pytest.mark.parametrize("name", ["api_keys_file", "tls_cert", "step_trace"])
def test_files_of_the_server_are_named_once(name: str) -> None:
    path = f"{NOTHING}/x"
    given = {"listen": ("127.0.0.1:0",), "device": "cpu", name: path}
    given |= {"tls_key": path} if name == "tls_cert" else {}
    (told,) = check_start.reasons(resolve(given, {}).config)
    assert told.count(path) == 1 and "Errno" not in told, told


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xff\xff", "the file is not a serialized google.protobuf.FileDescriptorSet"),
        (b"", "the set has no message 'a.B'"),
    ],
)
def test_the_flag_of_a_message_type_is_named(
    data: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").write_bytes(data)
    assert main.main(["generate", "x", "--protobuf", f"{tmp_path}/set", "a.B"]) == 2
    assert capsys.readouterr().err == f"photon-grpc: --protobuf: {problem}\n"
