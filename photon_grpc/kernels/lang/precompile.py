"""Compilation of all kernels of a start side by side, before the first of them runs.

A dry run finds them: the code of the start on separate objects, whose launches run nothing and request their
compilation. There is no list of kernels to maintain: every kernel that a step launches is found.

    with precompile_on_demand(dry_run, progress, num_workers=16):
        ...                 # the first kernel that Triton's cache lacks is compiled, then all others by the dry run

Compilers run in forks of this process, which inherit every object and share no interpreter lock:
docs/decisions/0010-start-up.md has the times of forks and threads.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import FileIO
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from photon_grpc.kernels.lang.jit import DRY_RUN, INTERPRETED, triton

_LOG = logging.getLogger(__name__)

#: A job runs for the files that it leaves.
Job = Callable[[], Any]
#: (done, total)
OnProgress = Callable[[int, int], None]

#: No job takes this long: forks that finish none for it hang.
SILENCE_S = 60.0
_INDEX_BYTES = 4


def precompile_on_demand(
    dry_run: Callable[[], None], progress: OnProgress, num_workers: int
) -> AbstractContextManager[None]:
    """Compile all kernels in the block when the first has to be compiled; without one there is no dry run.

    If the dry run fails, a warning is logged and kernels are compiled one after the other, as they are met.

    Args:
        dry_run: everything that is computed before the first request, on separate objects; waits for the device at
            its end, since nothing may be running when this process is forked.
        progress: of the compilations.
        num_workers: compilers at a time.
    """
    return at_first_compilation(lambda: _precompile(dry_run, progress, num_workers))


def _precompile(dry_run: Callable[[], None], progress: OnProgress, num_workers: int) -> None:
    start_s = time.perf_counter()
    try:
        with launches_collected() as jobs:
            dry_run()
        torch.cuda.empty_cache()
        found_s = time.perf_counter() - start_s
        # The last found (heads of many rows, long steps) take longest and begin first.
        done = run_in_forks(jobs[::-1], num_workers=num_workers, progress=progress)
    except Exception as error:
        _LOG.warning("kernels are compiled one after the other (%s: %s)", type(error).__name__, error)
        return
    took_s = time.perf_counter() - start_s
    _LOG.info("%d of %d kernels compiled in %.1f s (%.1f s to find them)", done, len(jobs), took_s, found_s)


def hash_compiler_ahead() -> None:
    """Have Triton hash its own files for kernels' names ahead of the first kernel, in a thread: 0.4 s."""
    triton_key = getattr(getattr(getattr(triton, "runtime", None), "cache", None), "triton_key", None)
    if triton_key is not None:
        # The result is cached; a kernel that comes earlier computes it a second time.
        threading.Thread(target=triton_key, name="compiler-hash", daemon=True).start()


# -- finding what is missing -------------------------------------------------------------------------------------------


@contextmanager
def at_first_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` once, within the launch that had a kernel compiled.

    It is not called if Triton's cache lacks nothing, or if Triton has no such hook (before 3.4).
    """
    compilation = getattr(getattr(triton, "knobs", None), "compilation", None)
    if INTERPRETED or not hasattr(compilation, "listener"):
        yield
        return
    before = compilation.listener

    def listener(*, cache_hit: bool = True, **event: Any) -> None:
        if before is not None:
            before(cache_hit=cache_hit, **event)
        # Nothing that a capture forbids is done within one.
        if not cache_hit and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            compilation.listener = before
            callback()

    compilation.listener = listener
    try:
        yield
    finally:
        compilation.listener = before


@contextmanager
def launches_collected() -> Iterator[list[Job]]:
    """Collect every launch of a kernel by this thread in the list instead of running it, until the block ends.

    There is one job a kernel and specialisation, which compiles it into the cache on disk.

    Torch still computes, and must not read memory that no kernel has filled: new tensors are zeros. Raise
    AttributeError where Triton cannot hand compilations over (before 3.5).
    """
    jobs: list[Job] = []
    with triton.AsyncCompileMode(_Collector(jobs), ignore_errors=True), _Zeroed():
        before = DRY_RUN.set(True)
        try:
            yield jobs
        finally:
            DRY_RUN.reset(before)


class _Collector(Executor):
    """A launcher that only records its launches."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    def submit(self, job: Job, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._jobs.append(partial(_compile, job))
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("compiled elsewhere"))
        return future


def _compile(job: Job) -> None:
    kernel = job()
    # The function that hands over its arguments is C, compiled and cached as well. Where it is not, that happens at the
    # first launch.
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


class _Zeroed(TorchFunctionMode):
    """A mode in which torch.empty and its like return zeros."""

    _MAKERS = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in self._MAKERS else result


# -- compiling it in forks ---------------------------------------------------------------------------------------------


def run_in_forks(
    jobs: Sequence[Job],
    *,
    num_workers: int,
    progress: OnProgress = lambda done, total: None,
    silence_s: float = SILENCE_S,
) -> int:
    """Return the number of jobs that raised nothing; wait for all, or until none has ended for `silence_s`.

    A fork may touch no device and take no lock that a thread of this process may hold. Raise OSError if no process can
    be started.
    """
    task_reader, task_writer = _pipe()
    done_reader, done_writer = _pipe()
    workers: list[int] = []
    with task_reader, task_writer, done_reader, done_writer:
        try:
            task_writer.write(b"".join(index.to_bytes(_INDEX_BYTES) for index in range(len(jobs))))
            task_writer.close()
            while len(workers) < min(num_workers, len(jobs)):
                workers.append(_fork(jobs, task_reader, done_reader, done_writer, silence_s))
            done_writer.close()
            return _count(done_reader, len(jobs), progress, silence_s)
        finally:
            for worker in workers:
                _end(worker)


def _pipe() -> tuple[FileIO, FileIO]:
    """Return the ends to read and to write."""
    reader, writer = os.pipe()
    return FileIO(reader, "rb"), FileIO(writer, "wb")


def _fork(jobs: Sequence[Job], task_reader: FileIO, done_reader: FileIO, done_writer: FileIO, silence_s: float) -> int:
    """Return the process id of a worker, which leads its own group: the programs that it starts end with it."""
    worker = os.fork()
    if worker:
        # Both do it: the group is there before either needs it.
        with suppress(OSError):
            os.setpgid(worker, worker)
        return worker
    try:
        os.setpgid(0, 0)
        # Without its parent a worker cannot write, and ends with its job.
        done_reader.close()
        _work(jobs, task_reader, done_writer, silence_s)
    finally:
        # Release nothing of the parent, write nothing that it has buffered.
        os._exit(0)


def _work(jobs: Sequence[Job], task_reader: FileIO, done_writer: FileIO, silence_s: float) -> None:
    # Objects of the parent have threads that are not here: no finalizer may wait for them.
    gc.disable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    while task := task_reader.read(_INDEX_BYTES):
        signal.alarm(max(1, int(silence_s)))
        done_writer.write(_do(jobs[int.from_bytes(task)]))


def _do(job: Job) -> bytes:
    try:
        job()
    except Exception:
        # The launch raises what this raised.
        return b"-"
    return b"+"


def _count(done_reader: FileIO, total: int, progress: OnProgress, silence_s: float) -> int:
    done = well = 0
    progress(0, total)
    poll = select.poll()
    poll.register(done_reader, select.POLLIN)
    while poll.poll(silence_s * 1000):
        marks = done_reader.read(4096)
        if not marks:
            break
        done, well = done + len(marks), well + marks.count(b"+")
        progress(done, total)
    return well


def _end(worker: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        if not os.waitpid(worker, os.WNOHANG)[0]:
            os.killpg(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
