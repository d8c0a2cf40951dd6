"""Jobs done in forks of this process, which know every object without being told and hold no interpreter's lock in
common."""

from __future__ import annotations

import gc
import os
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from typing import Any

#: Is done for what it leaves outside of the process: files.
Job = Callable[[], Any]
#: (done, total)
OnProgress = Callable[[int, int], None]

#: No job takes this long: forks that are silent for it hang.
SILENCE_S = 60.0
_INDEX_BYTES = 4


def run_in_forks(
    jobs: Sequence[Job],
    *,
    num_workers: int,
    progress: OnProgress = lambda done, total: None,
    silence_s: float = SILENCE_S,
) -> int:
    """The number of jobs that raised nothing. Waits for all of them, or until none has ended for `silence_s`.

    A fork may touch no device and take no lock that a thread of this process may hold. Raises OSError when there can be
    no processes.
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
    """The ends to read and to write."""
    reader, writer = os.pipe()
    return FileIO(reader, "rb"), FileIO(writer, "wb")


def _fork(jobs: Sequence[Job], task_reader: FileIO, done_reader: FileIO, done_writer: FileIO, silence_s: float) -> int:
    """The process id of a worker, which leads a group of its own: the programs that it starts end with it."""
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
        # Nothing of the parent is released, nothing it has buffered is written.
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
