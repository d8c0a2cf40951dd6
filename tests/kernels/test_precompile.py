"""Kernels are found without running one, compiled elsewhere, and found by the launches that follow.

A dry run that fails is a warning.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from photon_grpc.kernels.lang import precompile
from photon_grpc.kernels.lang.gluon import gl, gluon_jit
from photon_grpc.kernels.lang.jit import BEFORE_COMPILATION, DRY_RUN, Launchable, jit, once, tl
from photon_grpc.kernels.lang.precompile import (
    at_first_compilation,
    launches_collected,
    precompile_on_demand,
    run_in_forks,
)

triton = pytest.importorskip("triton")
needs_compiler = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")


class Compiled:
    """Hands its compilations over as Triton's JITFunction does, and fills `out` when it is really launched."""

    def __init__(self) -> None:
        self.compiled: list[str] = []

    def run(self, out: torch.Tensor, *, grid: object, warmup: bool, kind: str) -> None:
        if kind not in self.compiled:
            self._do_compile(kind)
        if not warmup:
            out.fill_(7)

    def _do_compile(self, kind: str) -> None:
        from triton.runtime import _async_compile

        mode = _async_compile.active_mode.get()
        if mode is None:
            self.compiled.append(kind)
        else:
            mode.submit(kind, lambda: self.compiled.append(kind), lambda kernel: None)


class FakeKernel(Launchable, Compiled):
    pass


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


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


def test_the_launches_of_another_thread_run_during_a_dry_run(kernel: FakeKernel) -> None:
    out = torch.zeros(1)
    with launches_collected() as jobs:
        serving = Thread(target=lambda: kernel[(1,)](out, kind="a"))
        serving.start()
        serving.join()
    assert out.item() == 7 and kernel.compiled == ["a"] and jobs == []


def test_what_was_to_be_launched_once_is_launched_after_a_dry_run(kernel: FakeKernel) -> None:
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
    with launches_collected() as jobs:
        meet()
    assert len(jobs) == 0 and kernel.compiled == ["a"]


def test_launches_run_again_after_a_failure(kernel: FakeKernel) -> None:
    with pytest.raises(IndexError), launches_collected():
        raise IndexError
    out = torch.zeros(1)
    kernel[(1,)](out, kind="a")
    assert out.item() == 7 and kernel.compiled == ["a"]


def test_compilations_are_told_of_before_they_begin(kernel: FakeKernel) -> None:
    compiled_before: list[list[str]] = []
    before = BEFORE_COMPILATION.set(lambda: compiled_before.append(list(kernel.compiled)))
    try:
        for kind in ("a", "b", "a"):
            kernel[(1,)](torch.zeros(1), kind=kind)
    finally:
        BEFORE_COMPILATION.reset(before)
    assert compiled_before == [[], ["a"]]


@contextmanager
def cache_in(directory: Path) -> Iterator[None]:
    before = triton.knobs.cache.dir
    triton.knobs.cache.dir = str(directory)
    try:
        yield
    finally:
        triton.knobs.cache.dir = before


class SM90:
    """A driver that compiles for a device which is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def sm_90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", SM90())


def fill_kernel(out):  # type: ignore[no-untyped-def]
    tl.store(out, 7)


def gluon_fill_kernel(out):  # type: ignore[no-untyped-def]
    gl.store(out, 7)


@needs_compiler
@pytest.mark.parametrize("make", [lambda: jit(fill_kernel), lambda: gluon_jit(gluon_fill_kernel)])
def test_what_a_dry_run_found_and_a_fork_compiled_is_in_the_cache(
    make: Callable[[], Any], sm_90: None, tmp_path: Path
) -> None:
    out = torch.zeros(1)
    with cache_in(tmp_path):
        with launches_collected() as jobs:
            for launched in (out, out, out.int(), out[:0]):
                make()[(1,)](launched)
        assert run_in_forks(jobs, num_workers=2) == len(jobs) == 2
        dry = DRY_RUN.set(True)
        with at_first_compilation(lambda: pytest.fail("compiled here")):
            assert make()[(1,)](out).asm["cubin"]
        DRY_RUN.reset(dry)
    assert not out.any()


def compile_one() -> Any:
    from tests.kernels.test_compile import compiled

    types = {"gate_up": "*bf16", "y": "*bf16", "stride": "i32"}
    from photon_grpc.kernels.swiglu import Gated, swiglu_kernel

    return compiled(swiglu_kernel, types, {"GATED": Gated(64, "silu"), "BLOCK": 64})


@needs_compiler
def test_only_what_is_missing_in_the_cache_is_told(tmp_path: Path) -> None:
    calls: list[str] = []
    with cache_in(tmp_path):
        assert run_in_forks([compile_one], num_workers=1) == 1
        with at_first_compilation(lambda: calls.append("found")):
            compile_one()
        assert calls == []
    with cache_in(tmp_path / "empty"), at_first_compilation(lambda: calls.append("missing")):
        compile_one()
    assert calls == ["missing"]
    assert triton.knobs.compilation.listener is None


@needs_compiler
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
    with at_first_compilation(lambda: pytest.fail("a kernel was missing")):
        pass


@contextmanager
def missing(callback: Callable[[], None]) -> Iterator[None]:
    """Return a cache that lacks the first kernel asked for."""
    callback()
    yield


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return what is given to the compilers; nothing is compiled."""
    given: list[object] = []

    @contextmanager
    def collected() -> Iterator[list[object]]:
        yield ["first", "last"]

    monkeypatch.setattr(precompile, "at_first_compilation", missing)
    monkeypatch.setattr(precompile, "launches_collected", collected)
    monkeypatch.setattr(precompile, "run_in_forks", lambda jobs, **_: given.extend(jobs) or len(jobs))
    return given


def precompiled_by(dry_run: Callable[[], None]) -> AbstractContextManager[None]:
    return precompile_on_demand(dry_run, lambda done, total: None, num_workers=2)


def test_a_cold_start_compiles_before_it_goes_on(cold: list[object], caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    with caplog.at_level(logging.INFO), precompiled_by(lambda: runs.append(1)):
        assert runs == [1]
        assert sorted(map(str, cold)) == ["first", "last"]
    assert "2 of 2 kernels" in caplog.text


def test_a_warm_start_has_no_dry_run() -> None:
    with precompiled_by(lambda: pytest.fail("nothing is missing")):
        pass


@pytest.mark.parametrize(
    "error", [RuntimeError("no memory"), AttributeError("AsyncCompileMode"), OSError("no process")]
)
def test_a_failing_dry_run_is_a_warning(error: Exception, cold: list[object], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise error

    with precompiled_by(fail):
        pass
    assert "one after the other" in caplog.text and str(error) in caplog.text
    assert cold == []
