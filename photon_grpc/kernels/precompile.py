"""Kernels compiled ahead of their first launch, many at once: what is to be compiled is found by launching without running anything.

    with at_first_compilation(rehearse): ...        `rehearse` is called when Triton has compiled a kernel rather than found it in its cache
    with launches_collected() as jobs: ...          launches run nothing; what a kernel would be compiled by is put on the list
    compile_side_by_side(jobs, num_workers=16)      in processes; the kernels are in Triton's cache on disk afterwards

Processes rather than threads: a quarter of a compilation is Python that holds the interpreter's lock. They are forks of this process, so that
they know every kernel without being told, and touch no device: a compiler needs none.
"""

from __future__ import annotations

import gc
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from photon_grpc.kernels.jit import INTERPRETED, KERNELS, ONCE, triton

#: Compiles one kernel into the cache on disk.
Job = Callable[[], Any]
#: (done, total)
OnProgress = Callable[[int, int], None]

#: No kernel takes this long: whoever is silent for it hangs.
SILENCE_S = 60.0
_INDEX_BYTES = 4


@contextmanager
def at_first_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Calls `callback` once, within the launch that had a kernel compiled; never where Triton does not tell (before 3.4) or nothing is missing."""
    compilation = getattr(getattr(triton, "knobs", None), "compilation", None)
    if INTERPRETED or not hasattr(compilation, "listener"):
        yield
        return
    before = compilation.listener

    def listener(*, cache_hit: bool = True, **told: Any) -> None:
        if before is not None:
            before(cache_hit=cache_hit, **told)
        # Nothing that a capture forbids is done within one.
        if not cache_hit and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            compilation.listener = before
            callback()

    compilation.listener = listener
    try:
        yield
    finally:
        compilation.listener = before


def before_compilations(callback: Callable[[], None]) -> None:
    """From here on calls `callback` before a kernel of ours is compiled, or read from Triton's cache on disk; never where Triton is missing.

    Triton has a hook for that, which cannot be told of kernels whose constants are functions.
    """
    for kernel in KERNELS:
        if hasattr(kernel, "_do_compile"):
            kernel._do_compile = _announced(kernel._do_compile, callback)


@contextmanager
def launches_collected() -> Iterator[list[Job]]:
    """Every launch of a kernel of ours fills the list instead of the device, until the block ends; one job a kernel and specialisation.

    What torch computes is computed, and must not be led astray by memory that no kernel has filled: new tensors are zeros. Raises AttributeError
    where Triton cannot hand compilations over (before 3.5).
    """
    jobs: list[Job] = []
    mode = triton.AsyncCompileMode(_Collector(jobs), ignore_errors=True)
    with mode, _Zeroed():
        try:
            for kernel in KERNELS:
                kernel.run = _compiling(kernel.run)
            yield jobs
        finally:
            for kernel in KERNELS:
                vars(kernel).pop("run", None)
            for remembering in ONCE:
                remembering.cache_clear()


def compile_side_by_side(
    jobs: Sequence[Job],
    *,
    num_workers: int,
    progress: OnProgress = lambda done, total: None,
    silence_s: float = SILENCE_S,
) -> int:
    """How many jobs ended well. Waits for all of them, or until none has ended for `silence_s`. Raises OSError when there can be no processes."""
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


class _Collector(Executor):
    """Runs nothing."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    def submit(self, job: Job, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._jobs.append(partial(_compile, job))
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("compiled elsewhere"))
        return future


class _Zeroed(TorchFunctionMode):
    """What torch.empty and its like give is filled with zeros."""

    _MAKERS = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in self._MAKERS else made


def _compile(job: Job) -> None:
    kernel = job()
    # The function that hands over its arguments is C, compiled and cached as well. Where it is not, that happens at the first launch.
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


def _compiling(run: Callable[..., Any]) -> Callable[..., None]:
    def compile_only(*args: Any, warmup: bool, **kwargs: Any) -> None:
        run(*args, warmup=True, **kwargs)

    return compile_only


def _announced(compile_kernel: Callable[..., Any], callback: Callable[[], None]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        callback()
        return compile_kernel(*args, **kwargs)

    return announced


def _pipe() -> tuple[FileIO, FileIO]:
    """The ends to read and to write."""
    reader, writer = os.pipe()
    return FileIO(reader, "rb"), FileIO(writer, "wb")


def _fork(jobs: Sequence[Job], task_reader: FileIO, done_reader: FileIO, done_writer: FileIO, silence_s: float) -> int:
    """The process id of a worker, which leads a group of its own: compilers that it calls end with it."""
    worker = os.fork()
    if worker:
        # Both do it: whoever needs the group first finds it.
        with suppress(OSError):
            os.setpgid(worker, worker)
        return worker
    try:
        os.setpgid(0, 0)
        # When the parent is gone nobody reads what a worker says, and it ends with its job.
        done_reader.close()
        _work(jobs, task_reader, done_writer, silence_s)
    finally:
        # Nothing of the parent is released, nothing it has buffered is written.
        os._exit(0)


def _work(jobs: Sequence[Job], task_reader: FileIO, done_writer: FileIO, silence_s: float) -> None:
    # Objects of the parent have threads that are not here: nobody may wait for them.
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
        # Whoever launches it will be told why it cannot be compiled.
        return b"-"
    return b"+"


def _count(done_reader: FileIO, total: int, progress: OnProgress, silence_s: float) -> int:
    done = well = 0
    progress(0, total)
    poll = select.poll()
    poll.register(done_reader, select.POLLIN)
    while poll.poll(silence_s * 1000):
        told = done_reader.read(4096)
        if not told:
            break
        done, well = done + len(told), well + told.count(b"+")
        progress(done, total)
    return well


def _end(worker: int) -> None:
    with suppress(ProcessLookupError, ChildProcessError):
        if not os.waitpid(worker, os.WNOHANG)[0]:
            os.killpg(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
