"""Compilations are found without running a kernel, made in other processes, and a failing one hurts nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from photon_grpc.kernels import precompile
from photon_grpc.kernels.jit import once
from photon_grpc.kernels.precompile import (
    at_first_compilation,
    before_compilations,
    compile_side_by_side,
    launches_collected,
)

triton = pytest.importorskip("triton")


def test_every_job_is_done_once_and_in_another_process(tmp_path: Path) -> None:
    def job(name: str) -> Callable[[], None]:
        def run() -> None:
            with (tmp_path / name).open("a") as file:
                file.write(f"{os.getpid()} ")

        return run

    def fail() -> None:
        raise ValueError("cannot be compiled")

    told: list[tuple[int, int]] = []
    jobs = [job(str(number)) for number in range(20)]
    done = compile_side_by_side([fail, *jobs, fail], num_workers=3, progress=lambda *now: told.append(now))
    assert done == 20
    assert told[0] == (0, 22) and told[-1] == (22, 22)
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

    assert compile_side_by_side([hang, lambda: None], num_workers=2, silence_s=2.0) == 1
    assert_is_gone(int((tmp_path / "worker").read_text()))


def assert_is_gone(worker: int) -> None:
    """It has ended and was waited for."""
    with pytest.raises(ChildProcessError):
        os.waitpid(worker, os.WNOHANG)


def test_a_worker_that_dies_takes_only_its_job(tmp_path: Path) -> None:
    jobs = [lambda: os._exit(1), *[(tmp_path / str(number)).touch for number in range(4)]]
    assert compile_side_by_side(jobs, num_workers=2) == 4


ORPHANS = """
import os, sys, time
from pathlib import Path
from photon_grpc.kernels.precompile import compile_side_by_side

def job(number):
    def run():
        Path(sys.argv[1], str(number)).write_text(str(os.getpid()))
        time.sleep(0.3)
    return run

compile_side_by_side([job(number) for number in range(100)], num_workers=2)
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
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    pytest.fail("not within 30 s")


def is_running(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_no_jobs_are_done_at_once() -> None:
    assert compile_side_by_side([], num_workers=4) == 0


class FakeKernel:
    """Hands its compilations over as Triton's does, and fills `out` when it is really launched."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def run(self, out: torch.Tensor, *, grid: object, warmup: bool, kind: str) -> None:
        from triton.runtime import _async_compile

        mode = _async_compile.active_mode.get()
        if mode is None:
            self.compiled.append(kind)
        else:
            mode.submit(kind, lambda: self.compiled.append(kind), lambda kernel: None)
        if not warmup:
            out.fill_(7)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    kernel = FakeKernel()
    monkeypatch.setattr(precompile, "KERNELS", [kernel])
    return kernel


def test_launches_become_jobs_and_run_nothing(kernel: FakeKernel) -> None:
    indices = torch.empty(3, dtype=torch.int64)
    with launches_collected() as jobs:
        # Memory as the allocator finds it would be an index out of range sooner or later.
        for made in (torch.empty(1000), torch.empty_like(indices), indices.new_empty((5, 2)), torch.empty((2, 3))):
            assert not made.any()
        out = torch.empty(3, dtype=torch.int64)
        for kind in ("a", "b", "a"):
            kernel[(1,)](out, kind=kind)
        assert not out.any()
    assert kernel.compiled == []
    for job in jobs:
        job()
    assert kernel.compiled == ["a", "b"]
    kernel[(1,)](out, kind="c")
    assert out.tolist() == [7, 7, 7] and kernel.compiled[-1] == "c"


def test_what_was_to_be_launched_once_is_launched_after_a_rehearsal(kernel: FakeKernel) -> None:
    out = torch.zeros(1)
    meet = once(lambda: kernel[(1,)](out, kind="a"))
    with launches_collected():
        meet()
    assert not out.any()
    meet()
    assert out.item() == 7
    out.zero_()
    meet()
    assert not out.any()
    precompile.ONCE.remove(meet)


def test_launches_run_again_after_a_failure(kernel: FakeKernel) -> None:
    with pytest.raises(IndexError), launches_collected():
        raise IndexError
    out = torch.zeros(1)
    kernel[(1,)](out, kind="a")
    assert out.item() == 7 and kernel.compiled == ["a"]


def test_every_kernel_of_ours_is_known() -> None:
    from photon_grpc.kernels.attention.decode_attention import decode_attention_kernel
    from photon_grpc.kernels.jit import KERNELS
    from photon_grpc.kernels.rms_norm import rms_norm_kernel

    assert any(kernel is rms_norm_kernel for kernel in KERNELS)
    assert any(kernel is decode_attention_kernel for kernel in KERNELS)


@contextmanager
def cache_in(directory: Path) -> Iterator[None]:
    before = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(directory)
    try:
        yield
    finally:
        triton.knobs.cache.dir = before


def compile_one() -> Any:
    from tests.kernels.test_compile import compiled

    types = {"gate_up": "*bf16", "y": "*bf16", "stride": "i32"}
    from photon_grpc.kernels.swiglu import swiglu_kernel

    return compiled(swiglu_kernel, types, {"SIZE": 64, "BLOCK": 64})


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
def test_what_another_process_compiled_is_found_here(tmp_path: Path) -> None:
    calls: list[str] = []
    with cache_in(tmp_path):
        assert compile_side_by_side([compile_one], num_workers=1) == 1
        with at_first_compilation(lambda: calls.append("found")):
            compile_one()
        assert calls == []
    with cache_in(tmp_path / "empty"), at_first_compilation(lambda: calls.append("missing")):
        compile_one()
    assert calls == ["missing"]
    assert triton.knobs.compilation.listener is None


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
def test_the_callback_may_compile_and_is_called_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def callback() -> None:
        calls.append(1)
        with cache_in(tmp_path / "inner"):
            compile_one()

    with cache_in(tmp_path / "outer"), at_first_compilation(callback):
        compile_one()
    assert calls == [1]


def test_a_triton_that_does_not_tell_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "triton", None)
    with at_first_compilation(lambda: pytest.fail("nobody told")):
        pass


def test_compilations_are_told_of_before_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Compiling:
        def _do_compile(self, kind: str) -> str:
            told.append(f"{kind} begins")
            return kind

    kernel = Compiling()
    monkeypatch.setattr(precompile, "KERNELS", [kernel, FakeKernel()])
    before_compilations(lambda: told.append("told"))
    assert kernel._do_compile("a") == "a"
    assert told == ["told", "a begins"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
def test_this_triton_compiles_where_it_is_listened_to() -> None:
    from photon_grpc.kernels.rms_norm import rms_norm_kernel

    assert callable(rms_norm_kernel._do_compile)
