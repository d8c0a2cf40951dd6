"""`photon-grpc top`: what it shows is the server's load, and every end of it is a sentence."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from photon_grpc.cli.main import main
from photon_grpc.cli.terminal.watching import View
from photon_grpc.client.admin import LoadSample, Replica
from photon_grpc.core.stats import Load
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.admin_listener import AdminListener
from photon_grpc.server.calls.guard import CallRules
from photon_grpc.server.tls import Certificates
from photon_grpc.service.endpoints.listen import admin_sockets
from tests.client.fake_server import serving_in_a_thread
from tests.server.fake_frontend import FakeFrontend

BUSY = Load(
    running=3,
    queued=2,
    queued_prompt_tokens=7000,
    total_blocks=100,
    owned_blocks=60,
    cached_blocks=25,
    free_blocks=13,
    limbo_blocks=2,
    step_s=0.0125,
    output_tokens_per_s=1234.0,
    prompt_tokens_per_s=56.0,
    prompt_tokens=100,
    cached_prompt_tokens=42,
    preemptions=7,
    draft_tokens=400,
    accepted_at=(200, 100),
)


class Admin:
    """AdminService over a fake front end, in a thread."""

    def __init__(self, address: str, certificates: Certificates | None = None) -> None:
        self.address, self._certificates = address, certificates
        self.frontend = FakeFrontend()
        self.frontend.load = BUSY
        self._is_up, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        while not self._is_up.wait(0.1):
            assert self._thread.is_alive()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    async def _serve(self) -> None:
        rules = CallRules(FailureLog())
        listener = AdminListener(self.frontend, drain=lambda _: None, rules=rules, certificates=self._certificates)  # type: ignore[arg-type]
        self.address = await listener.start(self.address)
        self._is_up.set()
        await asyncio.to_thread(self._is_over.wait)
        await listener.stop(0)


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    """Where `top` looks for servers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    served = Admin(f"unix:{tmp_path}/photon-grpc-1.sock")
    yield served
    served.stop()


def test_once_prints_plain_text(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    text = capsys.readouterr().out
    assert admin.address in text and "\x1b" not in text
    lines = {line[:12].strip(): line[12:].split() for line in text.splitlines() if line}
    assert [lines[name][0] for name in ("running", "queued", "tokens/s out", "tokens/s in")] == [
        "3",
        "2",
        "1,234",
        "56",
    ]
    assert (lines["step"][:2], lines["cache hits"][0], lines["preemptions"][0]) == (["12.5", "ms"], "42%", "7")
    assert lines["drafts"][0] == "75%" and "of 400 right since the start" in text
    assert "7,000 prompt tokens" in text and "■ 60 owned   ■ 25 cached   ■ 13 free" in text


def test_the_bars_and_the_history_are_in_proportion() -> None:
    view = View("here", Replica("1", time.time(), "cpu", 64, 16, 8, 4, 0))
    for rate in (0, 50, 100):
        view.add(LoadSample(running=4, owned_blocks=32, cached_blocks=16, free_blocks=16, output_tokens_per_s=rate))
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view.render())
    lines = {line[:12].strip(): line for line in console.export_text().splitlines()}
    assert lines["tokens/s out"].rstrip().endswith(" ▄█")
    assert (lines["running"].count("█"), lines["running"].count("░")) == (16, 16)
    assert (lines["KV blocks"].count("█"), lines["KV blocks"].count("░")) == (24, 8)


def test_drafts_are_shown_once_there_are_some_and_then_the_recent_ones() -> None:
    view = View("here", Replica("1", time.time(), "cpu", 64, 16, 8, 4, 0))
    shown = []
    for drafted, kept in ((0, 0), (10, 9), (110, 59)):
        view.add(LoadSample(draft_tokens=drafted, accepted_draft_tokens=kept))
        console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(view.render())
        shown += [" ".join(line.split()) for line in console.export_text().splitlines() if line.startswith("drafts")]
    assert shown == ["drafts 90% of 10 right recently", "drafts 54% of 110 right recently"]


def test_without_a_terminal_it_says_how(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "--once" in capsys.readouterr().err


def test_no_server_and_several_servers_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "photon-grpc-7.sock").touch()
    assert main(["top", "--once"]) == 2
    assert "no server" in capsys.readouterr().err
    servers = [Admin(f"unix:{tmp_path}/photon-grpc-{number}.sock") for number in (1, 2)]
    assert admin_sockets() == tuple(server.address for server in servers)
    assert main(["top", "--once"]) == 2
    told = capsys.readouterr().err
    for server in servers:
        assert server.address in told
        server.stop()


def test_a_wrong_address_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--target", "unix:/no/such.sock"]) == 1
    assert "no answer from unix:/no/such.sock" in capsys.readouterr().err
    with serving_in_a_thread() as other:
        assert main(["top", "--once", "--target", other.target]) == 1
    assert "serves no AdminService" in capsys.readouterr().err


class Screen:
    """`top` on a terminal of its own."""

    def __init__(self, flags: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = [sys.executable, "-m", "photon_grpc", "top", "--interval", "0.1", *flags]
        environment = os.environ | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.text = ""

    def read_until(self, *words: str) -> None:
        while not all(word in self.text for word in words):
            self.text += os.read(self._ours, 65536).decode("utf-8", "replace")

    def read_all(self) -> int:
        """Wait for the end of the process; return its exit code."""
        try:
            while data := os.read(self._ours, 65536):
                self.text += data.decode("utf-8", "replace")
        except OSError:  # how Linux tells the end of a terminal
            pass
        os.close(self._ours)
        return self.process.wait(120)


@contextmanager
def screen(*flags: str) -> Iterator[Screen]:
    shown = Screen(list(flags))
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()


def test_it_goes_on_until_ctrl_c(admin: Admin) -> None:
    with screen() as shown:
        shown.read_until("1,234")
        admin.frontend.load = Load(output_tokens_per_s=98765.0)
        shown.read_until("98,765")
        shown.process.send_signal(signal.SIGINT)
        assert shown.read_all() == 0
        assert f"{admin.address} keeps running" in shown.text and "Traceback" not in shown.text


def test_it_ends_with_the_server(admin: Admin) -> None:
    with screen("--target", admin.address) as shown:
        shown.read_until("1,234")
        admin.stop()
        assert shown.read_all() == 0
        assert f"the server at {admin.address} has stopped" in shown.text
