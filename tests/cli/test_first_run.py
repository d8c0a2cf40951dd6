"""`make run` and `make demo`, with a stand-in for the service: what is shown, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from photon_grpc import errors
from photon_grpc.cli import first_run as module
from photon_grpc.cli.first_addresses import choose_address, target_of
from photon_grpc.cli.first_run import ServeProcess, first_run

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = (sys.executable, "-m", "tests.cli.fake_serve")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERVE", STAND_IN)
    monkeypatch.chdir(ROOT)


def test_once_shows_a_generation_and_ends(capfd: pytest.CaptureFixture[str]) -> None:
    assert first_run([], choose_address("127.0.0.1:0"), once=True) == 0
    shown = capfd.readouterr().out
    assert "demo is ready" in shown
    assert "class Stack:\n    return n\n" in shown
    assert "tokens" in shown
    assert "Ctrl-C" not in shown


def test_without_once_it_says_what_to_try_and_serves_until_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    address = choose_address("127.0.0.1:0")
    threading.Timer(0, _interrupt_once_shown, args=(capfd.readouterr, shown := [], "until Ctrl-C")).start()
    assert first_run([], address, once=False) == 0
    everything = "".join(shown) + capfd.readouterr().out
    for hint in ("generate", "grpcurl", "SyncClient", address):
        assert hint in everything


def test_what_to_paste_begins_with_the_page(capfd: pytest.CaptureFixture[str]) -> None:
    page = "http://127.0.0.1:8123/"
    threading.Timer(0, _interrupt_once_shown, args=(capfd.readouterr, shown := [], "chat --target")).start()
    assert first_run([], choose_address("127.0.0.1:0"), once=False, page=page) == 0
    lines = ("".join(shown) + capfd.readouterr().out).splitlines()
    first = lines.index("# the page: chat, and the engine at work")
    assert lines[first + 1 : first + 4 : 2] == [page, next(line for line in lines if line.startswith("curl "))]
    titles = [line for line in lines if line.startswith("# ")]
    assert titles[1:4] == ["# curl", "# Python", "# grpcurl"]


def test_ctrl_c_amid_the_generation_ends_it_cleanly(capfd: pytest.CaptureFixture[str]) -> None:
    address = choose_address("127.0.0.1:0")
    threading.Timer(0, _interrupt_once_shown, args=(capfd.readouterr, shown := [], "return")).start()
    assert first_run(["--model=stalls"], address, once=False) == 0
    assert "until Ctrl-C" not in "".join(shown) + capfd.readouterr().out


def _interrupt_once_shown(read: object, shown: list[str], wanted: str) -> None:
    while wanted not in "".join(shown):
        shown.append(read().out)  # type: ignore[operator]
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_loading_ends_it_cleanly() -> None:
    command = (
        "from photon_grpc.cli import first_run as m; m.SERVE = {!r}; "
        "print(m.first_run(['--model=never-ready'], {!r}, once=True))"
    )
    program = command.format(STAND_IN, address := choose_address("127.0.0.1:0"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        _wait_for_listener(address)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate()
    assert process.returncode == 0
    assert shown.splitlines()[-1] == "0"


def test_a_service_that_is_stopped_before_it_catches_signals_ends_cleanly() -> None:
    async def stopped_early() -> int:
        async with ServeProcess.started(["--model=imports", "--listen", "127.0.0.1:1"]) as service:
            while service.stage == "starting":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await service.stop()

    assert asyncio.run(stopped_early()) == 0


def _wait_for_listener(address: str) -> None:
    from photon_grpc.client import SyncClient, Unreachable

    with SyncClient(address) as client:
        while True:
            try:
                client.is_ready()
                return
            except Unreachable:
                time.sleep(0.05)


def test_the_output_of_a_service_that_cannot_start_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert first_run(["--model=cannot-start"], choose_address("127.0.0.1:0"), once=True) == 2
    assert "cannot start: the weights are somewhere else" in capfd.readouterr().err


def test_a_failed_generation_is_a_failure() -> None:
    with pytest.raises(errors.InternalFailure):
        first_run(["--model=broken"], choose_address("127.0.0.1:0"), once=True)


def test_the_exit_code_of_a_service_that_dies_later_is_returned() -> None:
    assert first_run(["--model=dies"], choose_address("127.0.0.1:0"), once=False) == 3


def test_a_port_in_use_is_reported_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(errors.ConfigError, match=r"Address already in use.*port 0: any free one"):
            choose_address(f"127.0.0.1:{taken.getsockname()[1]}")


def test_addresses_to_listen_on_and_to_call() -> None:
    assert choose_address("unix:/run/s") == "unix:/run/s"
    host, _, port = choose_address("localhost:0").partition(":")
    assert host == "localhost"
    assert int(port) > 0
    assert target_of("0.0.0.0:50051") == "127.0.0.1:50051"
    assert target_of("[::]:50051") == "[::1]:50051"
    assert target_of("unix:/run/s") == "unix:/run/s"
