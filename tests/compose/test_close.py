"""Every way in which an `LLM` can end, and what its callers and readers are told."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from photon_grpc import LLM
from photon_grpc.core.batch import Batch
from photon_grpc.errors import Closed, EngineFailure, ModelLoadError
from photon_grpc.models.decoder import Decoder
from photon_grpc.runner import start
from photon_grpc.runner.build import graph_runner
from photon_grpc.runner.graphs import GraphLaunch
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Step
from tests.runner.test_graphs import plain_call
from tests.service.tiny import write_tiny_model

#: Ends a test that would hang.
LIMIT_S = 60.0
LONG = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("close") / "tiny")


@pytest.fixture
def open_llm(model: Path) -> Iterator[Callable[[], LLM]]:
    """Yield a function that opens programs; check that none stays open, nor any of their threads."""
    before = set(threading.enumerate())
    opened: list[LLM] = []

    def open_one() -> LLM:
        opened.append(LLM(model, load_format="dummy", device="cpu", num_blocks=512, max_num_seqs=8))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()
    assert set(threading.enumerate()) <= before


@pytest.fixture(autouse=True, scope="module")
def sigint_is_not_ignored() -> Iterator[None]:
    """As it is where a shell has started pytest in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Caller(threading.Thread):
    """A thread that calls, and how that ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        self.join(LIMIT_S)
        assert not self.is_alive(), "it waits for ever"
        return self.error


def read(stream: Iterator[object], has_begun: threading.Event) -> Callable[[], None]:
    def call() -> None:
        for _ in stream:
            has_begun.set()

    return call


def test_everybody_in_flight_is_told_that_it_was_closed(open_llm: Callable[[], LLM]) -> None:
    llm = open_llm()
    begun = [threading.Event() for _ in range(4)]
    callers = [Caller(read(llm.stream("a", **LONG), event)) for event in begun]
    paused, unread = llm.stream("b", **LONG), llm.stream("c", **LONG)
    next(paused)
    assert all(event.wait(LIMIT_S) for event in begun)
    callers += [Caller(lambda: llm.generate(["a"] * 20, **LONG)) for _ in range(3)]
    llm.close()
    assert [type(caller.end()) for caller in callers] == [Closed] * 7
    for call in (lambda: next(paused), lambda: next(unread), lambda: llm.generate("a"), lambda: next(llm.stream("a"))):
        with pytest.raises(Closed, match="this LLM is closed"):
            call()
    assert list(paused) == []


def test_readers_end_before_the_step_that_the_device_is_in(
    open_llm: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm()
    is_in_step, may_end = threading.Event(), threading.Event()
    submit = ModelRunner.submit

    def slow(self: ModelRunner, batch: object) -> object:
        is_in_step.set()
        assert may_end.wait(LIMIT_S)
        return submit(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "submit", slow)
    callers = [Caller(lambda: next(llm.stream("a", **LONG))), Caller(lambda: llm.generate("a", **LONG))]
    assert is_in_step.wait(LIMIT_S)
    closer = Caller(llm.close)
    assert [type(caller.end()) for caller in callers] == [Closed] * 2
    assert closer.is_alive()
    may_end.set()
    assert closer.end() is None


def test_close_in_the_loop_over_a_stream_ends_the_loop(open_llm: Callable[[], LLM]) -> None:
    llm = open_llm()
    stream = llm.stream("a", **LONG)
    with pytest.raises(Closed):
        for _ in stream:
            llm.close()
    stream.close()  # type: ignore[attr-defined]


def test_leaving_the_block_by_an_error_closes_and_passes_it_on(open_llm: Callable[[], LLM]) -> None:
    with pytest.raises(ZeroDivisionError), open_llm() as llm:
        stream = llm.stream("a", **LONG)
        next(stream)
        raise ZeroDivisionError
    with pytest.raises(Closed):
        next(stream)


def test_many_threads_may_close_at_once_while_many_call(open_llm: Callable[[], LLM]) -> None:
    llm = open_llm()
    is_time = threading.Event()

    def call_on() -> None:
        while True:
            llm.generate("a", max_tokens=2)

    def close() -> None:
        is_time.wait()
        llm.close()

    callers, closers = [Caller(call_on) for _ in range(4)], [Caller(close) for _ in range(4)]
    llm.generate("b", max_tokens=2)
    is_time.set()
    assert [closer.end() for closer in closers] == [None] * 4
    assert [type(caller.end()) for caller in callers] == [Closed] * 4


def test_a_signal_handler_may_close_under_a_call(open_llm: Callable[[], LLM]) -> None:
    llm = open_llm()
    before = signal.signal(signal.SIGALRM, lambda *_: llm.close())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Closed):
            while True:
                llm.generate(["a"] * 4, **LONG)
    finally:
        signal.signal(signal.SIGALRM, before)


def interrupt_soon() -> None:
    main = threading.main_thread().ident
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()


def test_ctrl_c_ends_the_call_and_not_the_program(open_llm: Callable[[], LLM]) -> None:
    llm = open_llm()
    for call in (lambda: llm.generate(["a"] * 60, **LONG), lambda: [list(llm.stream("a", **LONG)) for _ in range(60)]):
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            call()
    assert llm.generate("a", max_tokens=1)


def test_a_close_that_was_interrupted_is_finished_by_the_next(
    open_llm: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, has_begun, may_end = open_llm(), threading.Event(), threading.Event()
    submit = ModelRunner.submit

    def submit_late(self: ModelRunner, batch: Batch) -> object:
        has_begun.set()
        may_end.wait(LIMIT_S)
        return submit(self, batch)

    monkeypatch.setattr(ModelRunner, "submit", submit_late)
    caller = Caller(lambda: llm.generate("a", **LONG))
    # Else `close` may end before it is interrupted.
    assert has_begun.wait(LIMIT_S)
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    may_end.set()
    llm.close()
    assert type(caller.end()) is Closed


def test_an_engine_that_dies_ends_everything_with_its_failure(
    open_llm: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm()
    begun = llm.stream("a", **LONG)
    next(begun)

    def fail(self: ModelRunner, batch: object) -> object:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(ModelRunner, "submit", fail)
    with pytest.raises(EngineFailure, match="has failed"):
        for _ in begun:
            pass
    for call in (lambda: llm.generate(["a", "b"]), lambda: next(llm.stream("a")), lambda: llm.generate("a")):
        with pytest.raises(EngineFailure, match="has failed"):
            call()
    llm.close()
    with pytest.raises(Closed):
        llm.generate("a")


def test_an_engine_that_dies_under_a_call_that_has_shown_nothing(
    open_llm: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ModelRunner, batch: object) -> object:
        raise RuntimeError("the device is lost")

    llm = open_llm()
    monkeypatch.setattr(ModelRunner, "submit", fail)
    with pytest.raises(EngineFailure, match="has failed"):
        llm.generate("a")


def test_a_stream_that_is_read_keeps_its_program_open(model: Path) -> None:
    before = threading.active_count()
    stream = LLM(model, load_format="dummy", device="cpu", num_blocks=64).stream("a", **{**LONG, "max_tokens": 30})
    gc.collect()
    assert sum(len(delta.token_ids) for delta in stream) == 30
    del stream
    assert threading.active_count() == before


@pytest.mark.parametrize("who", ["frontend", "engine"])
def test_the_garbage_collector_may_end_a_program_in_a_thread_of_its_own(
    open_llm: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    llm, ended = open_llm(), threading.Event()

    def close() -> None:
        llm._program.close()
        ended.set()

    if who == "frontend":
        llm._program._loop.call_soon_threadsafe(close)
    else:
        submit = ModelRunner.submit
        monkeypatch.setattr(ModelRunner, "submit", lambda self, batch: (close(), submit(self, batch))[1])
        with pytest.raises(Closed):
            llm.generate("a")
    assert ended.wait(LIMIT_S)
    llm.close()


def test_closing_one_of_two_leaves_the_other(open_llm: Callable[[], LLM]) -> None:
    one, other = open_llm(), open_llm()
    stream = other.stream("a", **LONG)
    next(stream)
    one.close()
    assert next(stream) and other.generate("a", max_tokens=2)


def living(*kinds: type) -> int:
    gc.collect()
    return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())


@pytest.mark.parametrize("end", ["close", "drop", "crash"])
def test_nothing_of_the_model_outlives_its_program(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    def replaying(*args: object, **options: object) -> ModelRunner:
        """Graphs whose replays call the function again."""
        return graph_runner(*args, **options, progress=lambda done, total: None, capture=plain_call)  # type: ignore[arg-type]

    kinds = (Decoder, KVCache, SlotTable, GraphLaunch, Step, ModelRunner)
    before = living(*kinds)
    monkeypatch.setattr(start, "eager_runner", replaying)
    llm = LLM(model, load_format="dummy", device="cpu", num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64)
    llm.generate(["a", "b"], max_tokens=4)
    unread = llm.stream("a", **LONG) if end == "close" else None
    # Graphs have a second step, of a decoder with fewer layers.
    assert living(*kinds) == before + len((*kinds, Decoder, Step))
    if end == "crash":
        # The traceback in a record that is kept refers to the engine.
        caplog.set_level(logging.CRITICAL, "photon_grpc.compose.program")
        monkeypatch.setattr(ModelRunner, "submit", None)
        with pytest.raises(EngineFailure):
            llm.generate("a")
    if end == "drop":
        del llm
    else:
        llm.close()
    assert living(*kinds) == before
    del unread


def test_a_fork_ends_and_is_told_whose_the_program_is(model: Path) -> None:
    code = textwrap.dedent("""
        import os, signal, sys
        from photon_grpc import LLM
        from photon_grpc.errors import Closed
        llm = LLM(sys.argv[1], load_format="dummy", device="cpu", num_blocks=64)
        llm.generate("x", max_tokens=1)
        for what in ("exit", "close", "generate"):
            if (pid := os.fork()) == 0:
                signal.alarm(120)
                if what == "close":
                    llm.close()
                if what == "generate":
                    try:
                        llm.generate("x", max_tokens=1)
                    except Closed:
                        os._exit(0)
                    os._exit(1)
                sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0, what
        assert llm.generate("x", max_tokens=1)
    """)
    subprocess.run([sys.executable, "-c", code, str(model)], check=True)


def test_programs_one_after_another_leave_no_thread_and_no_file(open_llm: Callable[[], LLM]) -> None:
    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    open_llm().close()
    threads, files = threading.active_count(), num_files()
    for _ in range(6):
        with open_llm() as llm:
            next(llm.stream("a", **LONG))
    assert (threading.active_count(), num_files()) == (threads, files)


def test_a_program_that_cannot_be_opened_leaves_nothing(
    open_llm: Callable[[], LLM], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = living(Decoder, KVCache)
    wrong = write_tiny_model(tmp_path / "wrong")
    (wrong / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError):
        LLM(wrong, load_format="dummy", device="cpu")
    start = threading.Thread.start
    for unlucky in ("frontend", "engine"):

        def fail(self: threading.Thread, unlucky: str = unlucky) -> None:
            if self.name == unlucky:
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            LLM(model, load_format="dummy", device="cpu", num_blocks=64)
    monkeypatch.undo()
    assert living(Decoder, KVCache) == before
    assert open_llm().generate("a", max_tokens=1)


#: Forks a child for each ending, in which two threads go on calling: one that the interpreter waits for, one that it
#: does not. The children share what costs seconds, the imports, which start no thread.
_SCRIPT = """
import contextlib, os, signal, sys, threading
from photon_grpc import LLM
from photon_grpc.errors import Closed
import photon_grpc.compose.assemble, photon_grpc.compose.program, torch

def read():
    with contextlib.suppress(Closed):
        while True:
            list(llm.stream("b", max_tokens=40, ignore_eos=True))

assert threading.active_count() == 1
_, model, directory, *ends = sys.argv
children = {}
for number, end in enumerate(ends):
    if (child := os.fork()) == 0:
        signal.alarm(120)
        os.dup2(os.open(f"{directory}/{number}", os.O_WRONLY | os.O_CREAT), 2)
        break
    children[child] = number
else:
    for child, number in children.items():
        print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit(0)

llm = LLM(model, load_format="dummy", device="cpu", num_blocks=512)
stream = llm.stream("a", max_tokens=4000, ignore_eos=True)
next(stream)
for is_daemon in (True, False):
    threading.Thread(target=read, daemon=is_daemon).start()
exec(end)
"""

#: The last statement of a program, its exit status, and what it says.
ENDS = {
    "end": ("", 0, ""),
    "exit": ("sys.exit(3)", 3, ""),
    "error": ("1 / 0", 1, "ZeroDivisionError"),
    "SIGINT": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, ""),
}


@pytest.fixture(scope="module")
def ended(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return the exit status and stderr of a program for each of ENDS."""
    directory = tmp_path_factory.mktemp("ended")
    statements = [statement for statement, _, _ in ENDS.values()]
    command = [sys.executable, "-c", _SCRIPT, str(model), str(directory), *statements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT_S)
    codes = {int(number): int(code) for number, code in map(str.split, done.stdout.splitlines())}
    assert sorted(codes) == [*range(len(ENDS))], done.stderr
    return {end: (codes[number], (directory / str(number)).read_text()) for number, end in enumerate(ENDS)}


@pytest.mark.parametrize("end", ENDS)
def test_an_interpreter_ends_with_a_program_open(ended: dict[str, tuple[int, str]], end: str) -> None:
    _, code, said = ENDS[end]
    status, stderr = ended[end]
    assert status == code, stderr
    assert said in stderr and (said or not stderr), stderr
    assert "Fatal" not in stderr
