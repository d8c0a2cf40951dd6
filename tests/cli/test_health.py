"""`health`: its exit code is the answer, its line on stderr the reason."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from photon_grpc.cli import main
from tests.client.fake_server import serving_in_a_thread


def test_a_server_that_is_ready_exits_with_0_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread() as fake:
        assert main.main(["health", "--target", fake.target]) == 0
    assert capsys.readouterr() == ("", "")


def asked(target: str) -> int:
    return main.main(["health", "--target", target, "--timeout", "0.5"])


def test_a_loading_or_draining_server_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with serving_in_a_thread() as fake:
        fake.ready = False
        assert asked(fake.target) == 1
    assert capsys.readouterr().err.startswith(f"photon-grpc: MODEL_LOADING: {fake.target} was not ready")


@pytest.mark.parametrize("prepare", [lambda listener: None, lambda listener: listener.listen()], ids=["none", "silent"])
def test_a_missing_and_a_silent_server_exit_with_1(
    prepare: Callable[[socket.socket], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        prepare(listener)
        assert asked(f"127.0.0.1:{listener.getsockname()[1]}") == 1
    told = capsys.readouterr().err
    assert told.startswith("photon-grpc: UNREACHABLE: ")
    assert "Is a server running?" in told
