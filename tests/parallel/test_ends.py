"""What becomes of a program and its ranks when one of them ends or is stopped, in each phase."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from photon_grpc import LLM
from photon_grpc.bridge.ranks import RankChannel, RankRefused, RankValue
from photon_grpc.compose import leading_rank, rank_process
from photon_grpc.compose.leading_rank import LeadingRank
from photon_grpc.compose.rank_process import RankProcess
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ModelLoadError, StartupError
from photon_grpc.layers.parallel.group import MeshSizes
from photon_grpc.layers.parallel.processes import ProcessGroup, ProcessMesh
from photon_grpc.runner.start import RunnerStart
from photon_grpc.service.processes import engine
from photon_grpc.service.processes.child import CANNOT_START
from tests.service.running import ROOT, is_alive, wait_until

#: Where rank 0 is when rank 1 ends: the phase's name, and what begins it.
PHASES: dict[str, tuple[type, str]] = {
    "spawned": (LeadingRank, "__init__"),
    "load": (LeadingRank, "least"),
    "meeting": (ProcessGroup, "join"),
    "first step": (RunnerStart, "_warm_runner"),
}


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of other ranks that the test starts."""
    pids: list[int] = []
    begin = LeadingRank._start_and_watch

    def start_and_watch(self: LeadingRank) -> None:
        begun = self._are_begun.set
        self._are_begun.set = lambda: (pids.extend(self.pids), begun())[1]  # type: ignore[method-assign]
        begin(self)

    monkeypatch.setattr(LeadingRank, "_start_and_watch", start_and_watch)
    return pids


def rendezvous_files() -> int:
    """Return how many files by which ranks find each other are open."""
    links = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return sum("rendezvous" in link for link in links)


def send_at(phase: str, signum: int, pids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the signal to all other ranks when rank 0 comes to this phase."""
    kind, name = PHASES[phase]
    work: Callable[..., object] = getattr(kind, name)
    is_sent = threading.Event()

    def send() -> None:
        if pids and not is_sent.is_set():
            is_sent.set()
            for pid in pids:
                os.kill(pid, signum)

    def sending(self: object, *args: object, **options: object) -> object:
        send()
        result = work(self, *args, **options)
        send()
        return result

    monkeypatch.setattr(kind, name, sending)


@pytest.mark.parametrize(
    ("phase", "signum"),
    [
        ("spawned", signal.SIGKILL),
        pytest.param("spawned", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("load", signal.SIGKILL, marks=pytest.mark.full),
        ("meeting", signal.SIGKILL),
        pytest.param("meeting", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param("first step", signal.SIGKILL, marks=pytest.mark.full),
        pytest.param("first step", signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_a_program_says_at_once_that_a_rank_has_ended_while_it_starts(
    phase: str, signum: signal.Signals, followers: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    send_at(phase, signum, followers, monkeypatch)
    num_files = rendezvous_files()
    with pytest.raises(StartupError, match=r"rank 1 has ended by SIGKILL( from rank 0 \(.*\))? while it started"):
        LLM(device="cpu", tensor_parallel_size=2)
    assert followers and not any(map(is_alive, followers))
    assert list(tmp_path.iterdir()) == [] and not torch.distributed.is_initialized()
    # A meeting that was given up goes on for a while, with its file.
    assert phase == "meeting" or rendezvous_files() == num_files


@pytest.mark.parametrize(
    ("code", "told"), [(-signal.SIGKILL, "by SIGKILL"), (-40, "by signal 40"), (3, "with exit code 3")]
)
def test_any_end_of_a_rank_has_a_name(code: int, told: str) -> None:
    rank = RankProcess.__new__(RankProcess)
    rank.process = cast(Any, SimpleNamespace(poll=lambda: code))
    assert rank.end == told
    rank.complaint = "was stopped"
    assert rank.end == f"{told} from rank 0 (it was stopped)"


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 0), (2, 1), (8, 7), (64, 0)])
def test_many_ranks_are_not_started_before_it_is_known_that_they_can_be(
    num_ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(rank_process, "RankProcess", lambda rank, *rest: begun.append(rank) or MagicMock())
    started = engine._started(resolve({"tensor_parallel_size": num_ranks}, {}).config)
    assert begun == [*range(1, expected + 1)] and (started is not None) == bool(begun)
    if started is not None:
        started.close()


def test_ranks_end_with_a_start_that_is_refused(followers: list[int]) -> None:
    with pytest.raises(StartupError, match="step_trace /no/such: No such file"):
        LLM(device="cpu", tensor_parallel_size=2, step_trace="/no/such")
    assert followers and not any(map(is_alive, followers))
    ProcessMesh.refuse_another()


def test_ranks_that_have_begun_end_if_another_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = subprocess.Popen, []

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if begun:
            raise OSError("no process is left")
        begun.append(begin(*args, **options))
        return begun[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    config = resolve({"device": "cpu", "tensor_parallel_size": 3}, {}).config
    num_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError, match="another rank cannot be started: no process is left"):
        LeadingRank(config)
    assert begun[0].returncode == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == num_files
    ProcessMesh.refuse_another()


def test_ranks_end_if_another_model_of_the_process_was_first(followers: list[int]) -> None:
    config, first = resolve({"device": "cpu", "tensor_parallel_size": 2}, {}).config, ProcessMesh(0, MeshSizes(2), -1)
    with pytest.raises(StartupError, match="another model of this program"):
        LeadingRank(config)
    assert followers and not any(map(is_alive, followers))
    first.leave()


class FailingStart(LeadingRank):
    """A rank 0 whose only other rank has refused to start."""

    def __init__(self, reason: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            RankChannel(theirs).send(RankValue(0))
            RankChannel(theirs).send(RankRefused(reason))
        process = SimpleNamespace(wait=lambda: CANNOT_START)
        rank = SimpleNamespace(rank=1, channel=RankChannel(ours), process=process, early_end="rank 1 has ended")
        self._is_refused = False
        self._ended = Future()
        self._ended.set_result(cast(RankProcess, rank))
        self._met = Future()
        self._on_refused = None
        self._group = cast(ProcessMesh, SimpleNamespace(abort=lambda: None))

    def _meet(self, device: torch.device, hidden_size: int) -> None:
        """Wait for ever."""

    def close(self) -> None:
        self._ended.result().channel.close()


@pytest.mark.parametrize("error", [ModelLoadError("of rank 0"), RuntimeError("the peer has closed")])
def test_the_reason_of_a_rank_is_told_also_where_rank_0_fails_by_itself(error: Exception) -> None:
    reason = "lm_head has NaN scales"
    with pytest.raises(StartupError, match=f"rank 1: {reason}"), FailingStart(reason).starting():
        raise error
    with pytest.raises(StartupError, match=f"rank 1: {reason}"), contextlib.closing(FailingStart(reason)) as rank_0:
        rank_0.join(torch.device("cpu"), 16)


def test_the_reason_of_a_rank_is_there_for_a_program_that_loads_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading_rank, "_GRACE_S", 0.0)
    reason = "lm_head has NaN scales"
    with contextlib.closing(FailingStart(reason)) as rank_0:
        rank = rank_0._ended.result()
        rank_0._lost_early(rank)
        assert rank_0._value_of(rank) == 0
        with pytest.raises(StartupError, match=f"rank 1: {reason}"):
            rank_0._value_of(rank)


@pytest.mark.full
def test_a_program_starts_after_one_whose_rank_has_ended(followers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    send_at("meeting", signal.SIGKILL, followers, monkeypatch)
    with pytest.raises(StartupError):
        LLM(device="cpu", tensor_parallel_size=2)
    monkeypatch.undo()
    with LLM(device="cpu", tensor_parallel_size=2) as llm:
        assert llm.generate("def f", max_tokens=2)[0].token_ids


#: Ends itself by SIGKILL where %s begins, after it has printed the other rank's process id.
ENDED_PROGRAM = """
    import os, signal
    from photon_grpc import LLM
    from photon_grpc.compose.leading_rank import LeadingRank
    from photon_grpc.layers.parallel.processes import ProcessGroup
    from photon_grpc.runner.start import RunnerStart

    def end(*args, **options):
        import gc
        rank, = (each for each in gc.get_objects() if isinstance(each, LeadingRank))
        print(*rank.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    %s = end
    with LLM(device="cpu", tensor_parallel_size=2) as llm:
        llm.generate("def f", max_tokens=2)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "phase", ["LeadingRank.minimum", "ProcessGroup.join", "RunnerStart._warm_runner", "LeadingRank.launch"]
)
def test_ranks_end_with_rank_0(phase: str) -> None:
    program = textwrap.dedent(ENDED_PROGRAM % phase)
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pids = [int(pid) for pid in ended.stdout.split()]
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)), "the end of the other ranks")
