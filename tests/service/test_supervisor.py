"""What the supervisor does with its children; these have neither model nor gRPC, so that they start quickly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from photon_grpc.bridge.control import Bound, LoadingProgress, Ready, Serving
from photon_grpc.bridge.flight_recorder import SharedFlightRecorder
from photon_grpc.config.flags import ServeConfig, ServerConfig
from photon_grpc.core.frames import Facts
from photon_grpc.errors import ConfigError, StartupError
from photon_grpc.service.processes.child import Child, ChildCommand
from photon_grpc.service.processes.managed_process import RestartDelay
from photon_grpc.service.supervisor import Supervisor
from tests.kv_plans import kv_plan

STAND_INS = Path(__file__).parent / "stand_ins"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def stand_ins_are_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_INS), str(ROOT)]))
    # A machine that is busy may keep a child waiting for seconds.
    for who in ("ENGINE", "FRONTEND"):
        monkeypatch.setenv(f"STAND_IN_{who}_ALLOWED_S", "60")


@pytest.fixture(autouse=True)
def sighup_is_not_ignored() -> Iterator[None]:
    # The supervisor leaves SIGHUP ignored where nohup has started it, and so would one that nohup's pytest runs.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def allow_a_second_of_silence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """To the engines that start from here on, or to the front ends."""
    who = "ENGINE" if name.lower() == "engine" else "FRONTEND"
    monkeypatch.setenv(f"STAND_IN_{who}_ALLOWED_S", "1.0")


def new_service(
    frontends: int = 1,
    listen: tuple[str, ...] = ("127.0.0.1:0",),
    drain_timeout: float = 5.0,
    stderr: int | None = None,
) -> Supervisor:
    config = ServeConfig(server=ServerConfig(listen=listen, frontends=frontends, drain_timeout=drain_timeout))
    return Supervisor(config, engine="stand_in_engine", frontend="stand_in_frontend", stderr=stderr)


ENDS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


class Run:
    """A service running in this process, its log and its exit code."""

    def __init__(self, service: Supervisor, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        self.service = service
        self.caplog = caplog
        self.task = asyncio.create_task(service.run())

    def lines(self, text: str) -> list[str]:
        return [line for line in self.caplog.messages if text in line]

    async def until(self, text: str, times: int = 1) -> str:
        while len(self.lines(text)) < times:
            if self.task.done():
                self.task.result()
                pytest.fail(f"ended without {text!r}: {self.caplog.messages}")
            await asyncio.sleep(0.01)
        return self.lines(text)[-1]

    async def signalled(self, *signums: signal.Signals) -> int:
        for signum in signums:
            os.kill(os.getpid(), signum)
            await asyncio.sleep(0.1)
        return await self.task


@contextlib.asynccontextmanager
async def running(service: Supervisor, caplog: pytest.LogCaptureFixture):
    run = Run(service, caplog)
    try:
        yield run
    finally:
        if not run.task.done():
            run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)


def is_alive(pid: int) -> bool:
    """Neither gone nor dead and waiting for a parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("signum", ENDS)
async def test_it_says_what_is_ready_and_ends_in_order(caplog, signum):
    async with running(new_service(), caplog) as run:
        line = await run.until("ready on")
        assert line == "ready on 127.0.0.1:777 · stand-in · cpu float32 · 8 KV blocks of 16 tokens · kernels torch"
        pids = run.service.pids
        assert pids.keys() == {"engine", "front end 0"}
        assert await run.signalled(signum) == 0
        assert run.lines("stopped")
        assert not any(map(is_alive, pids.values()))


@pytest.mark.parametrize("is_engine_first", [True, False])
async def test_it_says_once_what_is_ready_whoever_of_its_children_is_heard_first(caplog, is_engine_first):
    caplog.set_level("INFO")
    supervisor = new_service(frontends=2)
    facts = Facts(128, 256, kv_plan(16), 8, 4, 64, 16, 1024, "cpu", "float32")
    for index in range(2):
        supervisor._on_frontend_message(index, Bound((f"127.0.0.1:{index}",), "m"))
    for _ in range(2):
        caplog.clear()
        if is_engine_first:
            supervisor._on_engine_message(Ready(facts))
        for index in range(2):
            supervisor._on_frontend_message(index, Serving(True))
        if not is_engine_first:
            assert not caplog.messages
            supervisor._on_engine_message(Ready(facts))
        supervisor._on_frontend_message(1, Serving(True))
        assert [line.partition(" · ")[0] for line in caplog.messages] == ["ready on 127.0.0.1:0"]
        supervisor._engine_ended(SimpleNamespace(is_at_fault=True))


@pytest.mark.parametrize(("signum", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 6, "signal 40")])
async def test_a_dead_engine_is_replaced_and_its_front_ends_joined_to_the_new_one(caplog, signum, name):
    async with running(new_service(frontends=2), caplog) as run:
        await run.until("ready on")
        before = run.service.pids
        os.kill(before["engine"], signum)
        await run.until(f"the engine was killed by {name}")
        await run.until("ready on", times=2)
        after = run.service.pids
        assert after.pop("engine") != before.pop("engine")
        assert after == before
        assert await run.signalled(signal.SIGTERM) == 0


async def test_a_dead_front_end_is_replaced_where_it_listened(caplog):
    async with running(new_service(listen=("127.0.0.1:0", "127.0.0.1:5")), caplog) as run:
        first = await run.until("ready on 127.0.0.1:777, 127.0.0.1:5 ")
        before = run.service.pids
        os.kill(before["front end 0"], signal.SIGKILL)
        assert await run.until("ready on", times=2) == first
        after = run.service.pids
        assert after["engine"] == before["engine"]
        assert after["front end 0"] != before["front end 0"]
        assert await run.signalled(signal.SIGTERM) == 0


async def test_a_front_end_that_a_living_engine_has_dropped_is_joined_to_it_again(caplog, monkeypatch):
    monkeypatch.setenv("STAND_IN_FRONTEND", "garbage once")
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        before = run.service.pids
        await run.until("ready on", times=2)
        assert run.service.pids == before
        assert await run.signalled(signal.SIGTERM) == 0


@pytest.mark.parametrize(("who", "name"), [("ENGINE", "engine"), ("FRONTEND", "front end 0")])
async def test_a_child_whose_loop_hangs_is_replaced(caplog, monkeypatch, tmp_path, who, name):
    monkeypatch.setenv(f"STAND_IN_{who}", "hangs")
    allow_a_second_of_silence(monkeypatch, who)
    stderr = (tmp_path / "stderr").open("w+")
    async with running(new_service(stderr=stderr.fileno()), caplog) as run:
        line = await run.until(f"the {name} has made no progress")
        assert line.endswith("s between steps, 1.0 s were allowed: it hangs and is killed")
        monkeypatch.delenv(f"STAND_IN_{who}")
        await run.until(f"the {name} was killed by SIGKILL; restarting")
        text = (tmp_path / "stderr").read_text()
        assert f"stand_in_{who.lower()}.py" in text
        await run.until("ready on", times=len(run.lines("ready on")) + 1)
        assert await run.signalled(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("behaviour", "signum", "suspects"),
    [
        ("hangs in a step", 0, {b"s" * 16: 2}),
        ("in a step", signal.SIGSEGV, {b"s" * 16: 2}),
        ("in a step", signal.SIGKILL, {}),
        ("in a step", signal.SIGSTOP, {}),
    ],
)
async def test_a_crash_or_a_hang_accuses_what_was_computed_and_a_kill_from_outside_does_not(
    caplog, monkeypatch, behaviour, signum, suspects
):
    monkeypatch.setenv("STAND_IN_ENGINE", behaviour)
    allow_a_second_of_silence(monkeypatch, "engine")
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        monkeypatch.delenv("STAND_IN_ENGINE")
        os.kill(run.service.pids["engine"], signum)
        await run.until("the engine was killed by")
        await run.until("ready on", times=2)
        assert SharedFlightRecorder(os.dup(run.service._flight.fd)).last.suspects == suspects


@pytest.mark.parametrize("name", ["engine", "front end 0"])
async def test_a_stopped_child_is_replaced(caplog, monkeypatch, name):
    allow_a_second_of_silence(monkeypatch, name)
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        before = run.service.pids
        os.kill(before[name], signal.SIGSTOP)
        await run.until("ready on", times=2)
        line = await run.until(f"the {name} has made no progress")
        assert line.endswith("1.0 s were allowed: it is stopped from outside and is killed")
        assert run.service.pids[name] != before[name]
        assert await run.signalled(signal.SIGTERM) == 0


async def test_a_child_that_was_told_to_end_is_not_taken_for_one_that_hangs(caplog):
    """It says nothing while it leaves, and has its time for that."""
    caplog.set_level("INFO")
    child = Child.start(ChildCommand("engine", "stand_in_engine"))
    child._watchdog.tick = lambda: "has made no progress"  # type: ignore[method-assign]
    ending = asyncio.create_task(child.end_within(0.5))
    await asyncio.sleep(0)
    child.end_if_hung()
    assert not caplog.messages
    assert await ending == -signal.SIGKILL
    child.close()


async def test_an_engine_that_announces_a_long_step_does_not_hang(caplog, monkeypatch):
    monkeypatch.setenv("STAND_IN_ENGINE", "long step")
    allow_a_second_of_silence(monkeypatch, "engine")
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        before = run.service.pids
        await asyncio.sleep(2.5)
        assert run.service.pids == before
        assert not run.lines("has made no progress")


@pytest.mark.parametrize(
    ("who", "message"), [("ENGINE", "model.layers.0 is missing"), ("FRONTEND", "the port is in use")]
)
async def test_what_cannot_start_says_why_and_leaves_nothing(caplog, monkeypatch, who, message):
    monkeypatch.setenv(f"STAND_IN_{who}", "cannot start")
    async with running(new_service(), caplog) as run:
        with pytest.raises(StartupError, match=message):
            await run.task
        assert run.service.pids == {} or not any(map(is_alive, run.service.pids.values()))


@pytest.mark.parametrize(
    ("behaviour", "text"), [("crash", "ended with exit code 1"), ("killed", "was killed by SIGKILL")]
)
async def test_an_engine_that_never_worked_is_not_started_for_ever(caplog, monkeypatch, behaviour, text):
    monkeypatch.setenv("STAND_IN_ENGINE", behaviour)
    async with running(new_service(), caplog) as run:
        assert await run.task == 1
        assert run.lines(f"the engine {text} before it was ready")


@pytest.mark.parametrize("signum", ENDS)
async def test_a_second_signal_ends_at_once(caplog, monkeypatch, signum):
    monkeypatch.setattr("photon_grpc.service.supervisor._ONE_SIGNAL_S", 0.0)
    monkeypatch.setenv("STAND_IN_FRONTEND", "never drains")
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        pids = run.service.pids
        assert await run.signalled(signal.SIGINT, signum) == 128 + signum
        assert not any(map(is_alive, pids.values()))
        assert run.lines("stopped at once")


async def test_a_hangup_is_left_alone_where_it_was_ignored_at_the_start(caplog):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with running(new_service(), caplog) as run:
            await run.until("ready on")
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
            assert not run.lines("draining")
            assert await run.signalled(signal.SIGTERM) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_signals_that_mean_nothing_end_nothing_and_are_told(caplog):
    idle = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO)
    async with running(new_service(), caplog) as run:
        # Also while it starts.
        await run.until("loading")
        os.kill(os.getpid(), signal.SIGUSR1)
        await run.until("SIGUSR1 is ignored; SIGTERM drains")
        await run.until("ready on")
        before = run.service.pids
        for signum in idle:
            for pid in (os.getpid(), *before.values()):
                os.kill(pid, signum)
            # SIGIO is SIGPOLL, too.
            await run.until(f"{signum.name} is ignored; SIGTERM drains")
        os.kill(os.getpid(), signal.SIGPIPE)
        await asyncio.sleep(0.1)
        assert run.service.pids == before and all(map(is_alive, before.values()))
        assert await run.signalled(signal.SIGTERM) == 0
    assert all(signal.getsignal(signum) is signal.SIG_DFL for signum in idle)


async def test_children_leave_signals_to_their_supervisor(caplog):
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        before = run.service.pids
        for signum in ENDS:
            for pid in before.values():
                os.kill(pid, signum)
            await asyncio.sleep(0.1)
        assert run.service.pids == before
        assert all(map(is_alive, before.values()))
        assert await run.signalled(signal.SIGTERM) == 0


async def test_a_child_that_reads_nothing_is_replaced(caplog, monkeypatch):
    """What waits for it would grow without end."""
    monkeypatch.setenv("STAND_IN_ENGINE", "deaf")
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        monkeypatch.delenv("STAND_IN_ENGINE")
        for _ in range(10_000):
            run.service._engine.child.send(LoadingProgress("", 0, 0))
            if run.lines("the engine reads nothing"):
                break
        assert run.lines("the engine reads nothing")
        await run.until("ready on", times=2)
        assert await run.signalled(signal.SIGTERM) == 0


async def test_one_wish_may_come_as_two_signals(caplog):
    async with running(new_service(), caplog) as run:
        await run.until("ready on")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await run.signalled(signal.SIGINT) == 0
        assert run.lines("stopped")


async def test_a_front_end_that_never_drains_is_ended(caplog, monkeypatch):
    monkeypatch.setenv("STAND_IN_FRONTEND", "never drains")
    monkeypatch.setattr("photon_grpc.service.supervisor._FRONTEND_GRACE_S", 0.1)
    async with running(new_service(drain_timeout=0.1), caplog) as run:
        await run.until("ready on")
        assert await run.signalled(signal.SIGTERM) == 0


async def test_front_ends_are_heard_while_they_drain_and_to_their_end(caplog, monkeypatch):
    monkeypatch.setenv("STAND_IN_FRONTEND", "counts")
    service = new_service(frontends=2)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(service._metrics, "received", lambda index, counted: told.append((index, counted.life)))
    async with running(service, caplog) as run:
        await run.until("ready on")
        assert await run.signalled(signal.SIGTERM) == 0
    assert sorted(told) == [(index, number) for index in range(2) for number in (1, 2, 3)]


async def test_unix_sockets_cannot_be_shared(caplog):
    async with running(new_service(frontends=2, listen=("unix:/tmp/x",)), caplog) as run:
        with pytest.raises(ConfigError, match="cannot share a Unix socket"):
            await run.task


@contextlib.contextmanager
def in_a_process(environ: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a service of stand-ins; return it, ready, and the process ids of its three children."""
    program = (
        "import asyncio, test_supervisor as t\n"
        "async def main():\n"
        "    service = t.new_service(frontends=2)\n"
        "    task = asyncio.create_task(service.run())\n"
        "    while len(service._serving) < 2: await asyncio.sleep(0.01)\n"
        "    print(*service.pids.values(), flush=True)\n"
        "    await task\n"
        "    print(*service.pids.values(), flush=True)\n"
        "asyncio.run(main())\n"
    )
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parent)])
    environ = os.environ | {"PYTHONPATH": paths} | (environ or {})
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(pids) == 3
            yield process, pids
        finally:
            process.kill()


def test_children_die_with_their_supervisor():
    with in_a_process() as (process, pids):
        process.kill()
        process.wait()
        give_up_s = time.monotonic() + 240
        while any(map(is_alive, pids)) and time.monotonic() < give_up_s:
            time.sleep(0.02)
        assert not any(map(is_alive, pids))


def test_a_pause_of_everybody_is_no_hang(monkeypatch):
    """Pause all children longer than they allow, as when a container is paused or the machine sleeps."""
    for who in ("ENGINE", "FRONTEND"):
        # More than a busy machine keeps a child waiting.
        monkeypatch.setenv(f"STAND_IN_{who}_ALLOWED_S", "3")
    with in_a_process() as (process, pids):
        everybody = (process.pid, *pids)
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.0)
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        assert all(map(is_alive, pids))
        process.terminate()
        assert process.wait() == 0
        assert "has made no progress" not in process.stderr.read()


def test_backoff_doubles_up_to_a_limit_and_forgets_after_a_long_life():
    backoff = RestartDelay()
    delays = [backoff.after(1.0) for _ in range(9)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff.after(60.0) == 0.1
    assert backoff.after(1.0) == 0.2
