"""A limit on address space that is too low: one line with the process, the limit and the remedy, and exit code 2."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys

import pytest

from photon_grpc.errors import StartupError
from photon_grpc.service.processes import address_space
from photon_grpc.service.processes.engine import main as engine_main
from photon_grpc.service.processes.frontend import main as frontend_main
from tests.service.running import ROOT

LIMITED = 1300 * 2**20


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "limit_bytes", lambda: LIMITED)


# Of them the interpreter itself, the command line, a thread, torch and numpy find too little.
@pytest.mark.parametrize("limit_mib", [16, 24, 40, 100, 1300])
def test_a_start_ends_with_one_line(limit_mib: int) -> None:
    command = [sys.executable, "-m", "photon_grpc", "serve", "--listen", "127.0.0.1:0"]
    limited = ["sh", "-c", f'ulimit -v {limit_mib * 1024} && exec "$@"', "sh", *command]
    done = subprocess.run(limited, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2, line
    assert "ulimit -v" in line and f"{limit_mib:,} MiB" in line


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_what_says_that_no_memory_is_left_is_known(error: Exception, limited: None) -> None:
    wrapped = ValueError("of something else")
    wrapped.__cause__ = error
    assert address_space.is_met_by(error) and address_space.is_met_by(wrapped)
    assert not address_space.is_met_by(RuntimeError("anything else"))


def test_without_a_limit_nothing_is_said_of_one() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    address_space.check_limit()
    assert not address_space.is_met_by(MemoryError())
    assert address_space.hint() == ""


@pytest.mark.parametrize("code", ["raise MemoryError", "import os; os.abort()"])
def test_the_engine_is_tried_before_anything_is_started(
    code: str, limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_space, "_TRY", code)
    with pytest.raises(StartupError, match=r"the engine needs more address space than .* \(1,300 MiB\)"):
        address_space.check_limit()


@pytest.mark.parametrize("code", ["", "raise RuntimeError('torch is broken')"])
def test_what_is_no_matter_of_memory_is_left_to_the_start(
    code: str, limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_space, "_TRY", code)
    address_space.check_limit()


class Control:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


class Ended(BaseException):
    pass


def end(code: int) -> None:
    raise Ended


@pytest.mark.parametrize(
    ("main", "work", "process"),
    [(engine_main, "engine._run", "the engine"), (frontend_main, "frontend._serve", "front end 0")],
)
def test_a_child_that_meets_it_says_so(
    main: object, work: str, process: str, limited: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = work.partition(".")[0]
    control = Control()

    def short(context: object) -> None:
        raise MemoryError

    monkeypatch.setattr(f"photon_grpc.service.processes.{work}", short)
    monkeypatch.setattr(f"photon_grpc.service.processes.{module}.enter_child", lambda argv: context_of(control))
    for name in ("_map_large_blocks", "log_to_stderr", "log_bare_lines"):
        monkeypatch.setattr(f"photon_grpc.service.processes.{module}.{name}", lambda *_, **__: None, raising=False)
    monkeypatch.setattr("os._exit", end)
    with contextlib.suppress(Ended):
        assert main([]) == 2  # type: ignore[operator]
    (said,) = control.sent
    assert said.message.startswith(f"{process} needs more address space")  # type: ignore[attr-defined]


def context_of(control: Control) -> object:
    from photon_grpc.bridge.control import Begin
    from photon_grpc.config.flags import ServeConfig
    from photon_grpc.service.processes.child import ChildContext

    return ChildContext(control, Begin(ServeConfig()), [], None, ())  # type: ignore[arg-type]
