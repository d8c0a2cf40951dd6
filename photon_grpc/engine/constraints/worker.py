"""A thread beside the engine's loop, for work that takes long: grammars are compiled and ids are walked there.

Owners take turns, a piece of a job at a time: a thousand jobs of one owner delay another's by one piece each round. Of
an owner's jobs those that have not begun come first, then the one that began first: were all to go on together, all
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

#: More than the trial in the front ends has: what ended there ends here too.
_STACK_BYTES = 64 * 2**20
#: Jobs that found no room look for it again after so long, and so much longer for each of them: all look at all.
_NO_ROOM_S, _NO_ROOM_EACH_S = 0.005, 0.001
#: Pause behind a piece of a job that goes on: on few cores steps are computed by the same ones.
_PAUSE_S = 0.005


class Progress(Enum):
    DONE = auto()
    #: A piece is done, and there is more.
    MORE = auto()
    #: Nothing was done: memory has to be freed first.
    NO_ROOM = auto()


class Job(Event):
    """Work of one owner, which wakes the engine when it is done."""

    __slots__ = ("__weakref__", "error", "has_begun", "is_cancelled", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        #: A piece is done; the queue's own.
        self.has_begun = False
        #: It cannot be done.
        self.error: BaseException | None = None
        #: Nobody waits for it any more; from any thread.
        self.is_cancelled = False

    @abstractmethod
    def work(self) -> Progress:
        """Do one piece, in the worker's thread. What it raises is the job's `error`, and its end."""


class _Jobs:
    """The jobs of one owner."""

    def __init__(self) -> None:
        self.new: deque[Job] = deque()
        #: Those that have begun; the one that began first is first.
        self.begun: deque[Job] = deque()


class JobQueue:
    """Jobs of several owners, who take turns."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, _Jobs] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._by_owner)

    def push(self, job: Job) -> None:
        self._by_owner.setdefault(job.owner, _Jobs()).new.append(job)

    def put_back(self, job: Job) -> None:
        """Take a job again that was popped and goes on."""
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
    """A thread that lives while there are jobs.

    Args:
        done: is called in the thread with every job that is done, spare ones excepted.
    """

    def __init__(self, done: Callable[[Event], None]) -> None:
        self._done = done
        self._lock = threading.Lock()
        self._jobs, self._spare = JobQueue(), JobQueue()
        #: Have found no room since they last looked, and look again then.
        self._no_room: list[Job] = []
        self._look_again_s = 0.0
        self._is_running = False

    def submit(self, job: Job) -> None:
        self._submit(self._jobs, job)

    def submit_spare(self, job: Job) -> None:
        """Take a job that no request waits for; it is done when no other is left."""
        self._submit(self._spare, job)

    def _submit(self, jobs: JobQueue, job: Job) -> None:
        with self._lock:
            jobs.push(job)
            if self._is_running:
                return
            self._is_running = True
        size = threading.stack_size(_STACK_BYTES)
        try:
            # No daemon: one that is in the library when the interpreter ends takes the process down with it.
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
            # The thread must not keep alive what nobody else holds.
            del job, taken

    def _next(self) -> tuple[Job, bool] | None:
        """Return the next job, and whether it is a spare one; None when the thread is to end."""
        while True:
            with self._lock:
                if not threading.main_thread().is_alive():
                    self._is_running = False
                    return None
                self._let_look_again()
                for jobs in (self._jobs, self._spare):
                    if jobs:
                        return jobs.pop(), jobs is self._spare
                if not self._no_room:
                    self._is_running = False
                    return None
            time.sleep(_NO_ROOM_S)

    def _let_look_again(self) -> None:
        now_s = time.monotonic()
        if self._no_room and now_s >= self._look_again_s:
            self._look_again_s = now_s + _NO_ROOM_S + _NO_ROOM_EACH_S * len(self._no_room)
            for job in self._no_room:
                self._jobs.push(job)
            self._no_room.clear()


def _piece(job: Job) -> Progress:
    try:
        return job.work()
    except BaseException as error:  # a panic of the library is no Exception
        job.error = error
        return Progress.DONE
