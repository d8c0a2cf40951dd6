"""Jobs run in other processes, which end with theirs, and a failing job does not affect others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from photon_grpc.kernels.lang.precompile import run_in_forks


def test_every_job_is_done_once_and_in_another_process(tmp_path: Path) -> None:
    def job(name: str) -> Callable[[], None]:
        def run() -> None:
            with (tmp_path / name).open("a") as file:
                file.write(f"{os.getpid()} ")

        return run

    def fail() -> None:
        raise ValueError("cannot be done")

    reported: list[tuple[int, int]] = []
    jobs = [job(str(number)) for number in range(20)]
    done = run_in_forks([fail, *jobs, fail], num_workers=3, progress=lambda *now: reported.append(now))
    assert done == 20
    assert reported[0] == (0, 22) and reported[-1] == (22, 22)
    processes = [(tmp_path / str(number)).read_text().split() for number in range(20)]
    assert all(len(ran) == 1 for ran in processes)
    workers = {int(ran[0]) for ran in processes}
    assert os.getpid() not in workers
    for worker in workers:
        assert_is_gone(worker)


def test_what_hangs_is_left_and_ended(tmp_path: Path) -> None:
    def hang() -> None:
        (tmp_path / "worker").write_text(str(os.getpid()))
        time.sleep(600)

    assert run_in_forks([hang, lambda: None], num_workers=2, silence_s=2.0) == 1
    assert_is_gone(int((tmp_path / "worker").read_text()))


def assert_is_gone(worker: int) -> None:
    """Check that the process has ended and was waited for."""
    with pytest.raises(ChildProcessError):
        os.waitpid(worker, os.WNOHANG)


def test_a_worker_that_dies_takes_only_its_job(tmp_path: Path) -> None:
    jobs = [lambda: os._exit(1), *[(tmp_path / str(number)).touch for number in range(4)]]
    assert run_in_forks(jobs, num_workers=2) == 4


ORPHANS = """
import os, sys, time
from pathlib import Path
from photon_grpc.kernels.lang.precompile import run_in_forks

def job(number):
    def run():
        Path(sys.argv[1], str(number)).write_text(str(os.getpid()))
        time.sleep(0.3)
    return run

run_in_forks([job(number) for number in range(100)], num_workers=2)
"""


def test_workers_end_soon_after_their_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)])
    wait_until(lambda: len(list(tmp_path.iterdir())) > 4)
    parent.kill()
    parent.wait()
    workers = {int(path.read_text()) for path in tmp_path.iterdir()}
    assert len(workers) == 2
    wait_until(lambda: not any(is_running(worker) for worker in workers))
    assert len(list(tmp_path.iterdir())) < 100


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(4800):
        if holds():
            return
        time.sleep(0.05)
    pytest.fail("not within 240 s")


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_no_jobs_are_done_at_once() -> None:
    assert run_in_forks([], num_workers=4) == 0
