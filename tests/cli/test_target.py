"""`--target`: what cannot be an address is refused before anything is called, with what to write instead."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from photon_grpc.cli import main
from photon_grpc.cli.terminal.connection import check_target
from photon_grpc.errors import ConfigError


@pytest.mark.parametrize(
    ("target", "instead"),
    [
        ("localhost", "names no port; write --target localhost:50051"),
        ("http://127.0.0.1:50051", "is a URL, not an address; write --target 127.0.0.1:50051"),
        ("https://llm.example/v1", "write --target llm.example:50051 --tls-ca public"),
        ("http://[::1]", "write --target [::1]:50051"),
        ("::1:50051", "write HOST:PORT, [IPV6]:PORT or unix:PATH"),
        ("host:http", "'http' in 'host:http' is not a port"),
        ("unix:", "is not an address"),
    ],
)
def test_an_invalid_address_is_refused_with_a_suggestion(target: str, instead: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_target(target)
    assert instead in str(refused.value)


@pytest.mark.parametrize(
    "target",
    ["h:1", "[::1]:1", "unix:/s", "unix:s", "unix:///s", "dns:///h", "dns:h:1", "ipv4:1.2.3.4:5,1.2.3.5:5", "xds:///h"],
)
def test_names_that_grpc_resolves_are_accepted(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize(
    "call",
    [["generate", "x"], ["chat"], ["bench"], ["health"], ["top", "--once"], ["quarantine"]],
    ids=lambda call: call[0],
)
def test_every_verb_checks_it(call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([*call, "--target", "localhost"]) == 2
    assert "write --target localhost:50051" in capsys.readouterr().err


def test_the_variable_is_checked_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PHOTON_TARGET", "localhost")
    assert main.main(["health"]) == 2
    assert "names no port" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc")
def test_several_servers_are_listed_with_their_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, gone = f"unix:/tmp/photon-grpc-{os.getpid()}.sock", "unix:/tmp/photon-grpc-9999999999.sock"
    monkeypatch.setattr("photon_grpc.service.endpoints.listen.admin_sockets", lambda: (ours, gone))
    assert main.main(["top", "--once"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "servers are running" in lines[0]
    assert lines[1].startswith(f"  {ours}  ") and Path(sys.executable).name in lines[1]
    assert lines[2].strip() == gone
