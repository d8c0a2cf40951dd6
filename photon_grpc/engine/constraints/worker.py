"""A thread beside the engine's loop that compiles grammars and walks ids, which takes long.

Owners take turns, with one piece of a job at a time, so a thousand jobs of one owner delay the job of another by one
piece per round. Of an owner's jobs the new ones come first, then the one that began first: if all went on together, all
would be late.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum, auto

from photon_grpc.core.ports import Event

#: More than the trial in the front ends has, so that what succeeded there succeeds here.
_STACK_BYTES = 64 * 2**20
#: Jobs that found no room look again after this time, plus this much for each of them, since each looks at all.
_NO_ROOM_S, _NO_ROOM_EACH_S = 0.005, 0.001
#: Pause after a piece of an unfinished job, since with few cores steps are computed on the same ones.
_PAUSE_S = 0.005


class Progress(Enum):
    DONE = auto()
    #: A piece is done and more remains.
    MORE = auto()
    #: Nothing was done, since memory has to be freed first.
    NO_ROOM = auto()


class Job(Event):
    """Work for one owner, which wakes the engine when it is done."""

    __slots__ = ("__weakref__", "error", "has_begun", "is_cancelled", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        #: Whether a piece is done; set by the queue.
        self.has_begun = False
        #: Why the job cannot be done.
        self.error: BaseException | None = None
        #: Whether nobody waits for it any more; set by any thread.
        self.is_cancelled = False

    @abstractmethod
    def work(self) -> Progress:
        """Do one piece, in the worker's thread. An exception becomes the job's `error` and ends it."""


class _Jobs:
    """The jobs of one owner."""

    def __init__(self) -> None:
        self.new: deque[Job] = deque()
        #: Jobs that have begun, the earliest first.
        self.begun: deque[Job] = deque()


class JobQueue:
    """Jobs of several owners, which take turns."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, _Jobs] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def push(self, job: Job) -> None:
        self._by_owner.setdefault(job.owner, _Jobs()).new.append(job)

    def put_back(self, job: Job) -> None:
        """Put back a job that was popped and is not done."""
        begun = self._by_owner.setdefault(job.owner, _Jobs()).begun
        if job.has_begun:
            begun.appendleft(job)
        else:
            job.has_begun = True
            begun.append(job)

    def pop(self) -> Job:
        """Take the next job of the owner whose turn it is."""
        owner, jobs = next(iter(self._by_owner.items()))
        job = (jobs.new or jobs.begun).popleft()
        self._by_owner.move_to_end(owner)
        if not jobs.new and not jobs.begun:
            del self._by_owner[owner]
        return job


class Worker:
    """A thread that runs while there are jobs.

    Args:
        done: called in the thread with every job that is done, except spare ones.
    """

    def __init__(self, done: Callable[[Event], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._jobs, self._spare = JobQueue(), JobQueue()
        #: Jobs that found no room, and when they look again.
        self._no_room: list[Job] = []
        self._look_again_s = 0.0
        self._is_running = False

    def submit(self, job: Job) -> None:
        self._submit(self._jobs, job)

    def submit_spare(self, job: Job) -> None:
        """Add a job that no request waits for; it runs when there is no other."""
        self._submit(self._spare, job)

    def _submit(self, jobs: JobQueue, job: Job) -> None:
        with self._lock:
            jobs.push(job)
            if self._is_running:
                return
            self._is_running = True
        size = threading.stack_size(_STACK_BYTES)
        try:
            # Not a daemon: one inside the library when the interpreter exits would crash the process.
            threading.Thread(target=self._run, name="grammars").start()
        except BaseException:
            self._is_running = False
            raise
        finally:
            threading.stack_size(size)

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            job, is_spare = taken
            progress = Progress.DONE if job.is_cancelled else _piece(job)
            if progress is Progress.NO_ROOM and not is_spare:
                self._no_room.append(job)
            elif progress is Progress.MORE:
                with self._lock:
                    (self._spare if is_spare else self._jobs).put_back(job)
                time.sleep(_PAUSE_S)
            elif not is_spare and not job.is_cancelled:
                self._done(job)
            # The thread must not keep finished jobs alive.
            del job, taken

    def _next(self) -> tuple[Job, bool] | None:
        """Return the next job, and whether it is a spare one; None when the thread must end."""
        while True:
            with self._lock:
                if not threading.main_thread().is_alive():
                    self._is_running = False
                    return None
                self._requeue_waiting()
                for jobs in (self._jobs, self._spare):
                    if jobs:
                        return jobs.pop(), jobs is self._spare
                if not self._no_room:
                    self._is_running = False
                    return None
            time.sleep(_NO_ROOM_S)

    def _requeue_waiting(self) -> None:
        now_s = time.monotonic()
        if self._no_room and now_s >= self._look_again_s:
            self._look_again_s = now_s + _NO_ROOM_S + _NO_ROOM_EACH_S * len(self._no_room)
            for job in self._no_room:
                self._jobs.push(job)
            self._no_room.clear()


def _piece(job: Job) -> Progress:
    try:
        return job.work()
    except BaseException as error:  # a panic of the library is not an Exception
        job.error = error
        return Progress.DONE
