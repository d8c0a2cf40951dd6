"""Rank 0 and the processes of the other ranks: their start, what it tells them, and the detection of their end.

A thread starts them and waits for their end: the system ends a child when the *thread* that started it ends. No rank
can go on without the others, and rank 0 may be waiting for one on the device, so that thread reports their end.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from photon_grpc.bridge.codec import encode
from photon_grpc.bridge.heartbeat import TICK_S, Watchdog, exit_code, is_stopped, shared_file
from photon_grpc.bridge.ranks import (
    BeginRank,
    Launch,
    Least,
    Offer,
    RankChannel,
    RankMessage,
    RankRefused,
    ReadStep,
    SharedMasks,
)
from photon_grpc.compose.assemble import check_parallel, mesh_sizes, pick_device
from photon_grpc.compose.split_model import check_split
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Runner
from photon_grpc.errors import StartupError
from photon_grpc.layers.parallel.processes import ProcessMesh
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.ranks import ALONE, LeadingRanks, LeadingRunner

log = logging.getLogger(__name__)

#: What another rank runs: `python -m MODULE PID CHANNEL_FD HEARTBEAT_FD RENDEZVOUS_FD`.
MODULE = "photon_grpc.service.processes.rank"
#: Time for rank 0 to report by itself why a rank could not start, before the thread that watches ends it.
_GRACE_S = 2.0
#: Time for that thread to report the end of a rank before what failed by it.
_REPORT_S = 1.0
#: Time in which it notices an end, and its interval of looking for one.
_NOTICE_S, _LOOK_S = 0.1, 0.02
_LOOKS_A_TICK = round(TICK_S / _LOOK_S)
#: A rank may be stopped for so long.
_STOPPED_S = 2.0


def ranks_of(
    config: ServeConfig,
    on_refused: Callable[[str], None] | None = None,
    on_lost: Callable[[int], None] | None = None,
) -> LeadingRanks:
    """Start the other ranks that the settings ask for; arguments as of LeadingRank.

    By default what waits for a rank that has ended fails.

    Raise ConfigError and ModelLoadError for what cannot be split so, before a process is started; StartupError if one
    cannot be, and where another model of this process is on several ranks.
    """
    device = pick_device(config.device.device)
    check_parallel(config.parallel, device)
    if config.parallel.num_ranks == 1:
        return ALONE
    check_split(config, on_cuda=device.type == "cuda")
    return LeadingRank(config, on_refused, on_lost)


class OneRank:
    """This process among the ranks; `mesh` has their groups."""

    def __init__(self, rank: int, config: ServeConfig, rendezvous: int) -> None:
        self._group = ProcessMesh(rank, mesh_sizes(config.parallel), rendezvous)
        self.mesh = self._group.mesh

    def alone(self) -> AbstractContextManager[None]:
        return self._group.alone()

    def join(self, device: torch.device, hidden_size: int) -> None:
        self._group.join(device, hidden_size)

    def leave(self) -> None:
        """Give up the group."""
        self._group.leave()


class RankProcess:
    """One of the other ranks: its process, its socket and its heartbeat."""

    def __init__(self, rank: int, rendezvous: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.watchdog = Watchdog()
        self.channel = RankChannel(ours)
        with theirs:
            files = theirs.fileno(), self.watchdog.fd, rendezvous
            command = [sys.executable, "-m", MODULE, str(os.getpid()), *map(str, files)]
            # As many threads as here: they are part of the numerics on a CPU.
            env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
            # In a session of its own no signal of a terminal reaches it.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=files, env=env, start_new_session=True
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        self._stopped_ticks = 0

    def tick(self) -> str:
        """Return a complaint if it stands still, else "". Call every TICK_S."""
        self._stopped_ticks = self._stopped_ticks + 1 if is_stopped(self.process.pid) else 0
        if self._stopped_ticks * TICK_S >= _STOPPED_S:
            return f"is stopped from outside for {_STOPPED_S:.0f} s"
        return self.watchdog.tick()

    def close(self) -> None:
        """End it: it has nothing to wait for without a socket."""
        self.channel.close()
        self.process.kill()
        self.process.wait()
        self.watchdog.close()
        os.close(self.pidfd)

    @property
    def has_ended(self) -> bool:
        """Whether its main thread has ended, or all of it."""
        return self.process.poll() is not None or exit_code(self.process.pid) is not None

    @property
    def code(self) -> int:
        """The exit code, negative for a signal, of a rank that has ended."""
        return self.process.poll() or exit_code(self.process.pid) or self.process.wait()

    @property
    def end(self) -> str:
        """Return how it ended."""
        code, names = self.code, {each.value: each.name for each in signal.Signals}
        return f"by {names.get(-code, f'signal {-code}')}" if code < 0 else f"with exit code {code}"

    @property
    def early_end(self) -> str:
        """Return that it ended before the first step."""
        return f"rank {self.rank} has ended {self.end} while it started"


class LeadingRank(OneRank):
    """Rank 0 and the processes of the others.

    Args:
        on_refused: called with the reason why the ranks cannot start, while this rank may wait for them.
        on_lost: called with the exit code of a rank that has ended after the start; negative for a signal.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_refused: Callable[[str], None] | None = None,
        on_lost: Callable[[int], None] | None = None,
    ) -> None:
        ProcessMesh.refuse_another()
        self._size = config.parallel.num_ranks
        self._rendezvous = shared_file("rendezvous")
        super().__init__(0, config, self._rendezvous)
        self._on_refused = on_refused
        self._on_lost = on_lost or (lambda code: self._group.abort())
        self._is_started = self._is_refused = self._is_closed = False
        #: The first rank that has ended.
        self._ended: Future[RankProcess] = Future()
        self._met: Future[None] = Future()
        self._ranks: list[RankProcess] = []
        self._are_begun = threading.Event()
        self._error: OSError | None = None
        self._watcher = threading.Thread(target=self._start_and_watch, name="ranks", daemon=True)
        self._watcher.start()
        self._are_begun.wait()
        if self._error is not None:
            raise StartupError(f"a process for another rank cannot be started: {self._error}")
        channels = [rank.channel for rank in self._ranks]
        self._masks = SharedMasks(channels)
        for rank in self._ranks:
            rank.channel.send(BeginRank(config, rank.rank))

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    # -- the start -----------------------------------------------------------------------------------------------------

    def least(self, number: int) -> int:
        for rank in self._ranks:
            number = min(number, self._offer(rank))
        self._tell(Least(number))
        return number

    def _offer(self, rank: RankProcess) -> int:
        try:
            message = rank.channel.receive()
        except EOFError:
            self._is_refused = True
            raise StartupError(rank.early_end) from None
        if isinstance(message, RankRefused):
            self._is_refused = True
            raise StartupError(_reason(rank, message))
        if not isinstance(message, Offer):
            raise TypeError(f"rank {rank.rank} sent {message}")
        return message.number

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Compute alone, then let the others begin: they find all kernels compiled."""
        yield
        self.least(0)

    def join(self, device: torch.device, hidden_size: int) -> None:
        """Meet the others, in a thread: what the libraries do there goes on waiting for a rank that has ended.

        Raise StartupError as soon as one has.
        """
        self._met.set_running_or_notify_cancel()
        threading.Thread(target=self._meet, args=(device, hidden_size), name="meeting", daemon=True).start()
        either: tuple[Future[Any], ...] = (self._met, self._ended)
        wait(either, return_when=FIRST_COMPLETED)
        if not self._met.done():
            self._is_refused = True
            raise StartupError(_last_words(self._ended.result()))
        self._met.result()

    def _meet(self, device: torch.device, hidden_size: int) -> None:
        try:
            self._group.join(device, hidden_size)
        except BaseException as error:
            self._met.set_exception(error)
        else:
            self._met.set_result(None)

    @contextmanager
    def starting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            cause = self._cause(error)
            self.close()
            if cause is not None:
                raise cause from error
            raise

    def _cause(self, error: BaseException) -> StartupError | None:
        """Return why the start fails if not by this error: what a rank that has ended was needed for fails, too."""
        if self._is_refused:
            return None
        self._is_refused = True
        report_s = _NOTICE_S if isinstance(error, StartupError) else _REPORT_S
        return StartupError(_last_words(self._ended.result())) if wait((self._ended,), report_s).done else None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def lead(self, runner: ModelRunner) -> Runner:
        # The others send their offers behind their first heartbeats.
        self.least(0)
        self._is_started = True
        return LeadingRunner(runner, self)

    def mask_memory(self, device: torch.device) -> Callable[[int], memoryview]:
        return self._masks.allocate

    def launch(self, batch: Batch) -> None:
        self._tell(Launch(batch))

    def sample(self, masks: memoryview) -> None:
        self._tell(self._masks.message(masks))

    def read(self) -> None:
        self._tell(ReadStep())

    def await_report(self) -> None:
        self._watcher.join(_REPORT_S)

    def close(self) -> None:
        """End the other ranks."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self._ranks:
            rank.close()
        self._group.leave()
        if not self._met.running():
            # A meeting that goes on finds the file by its number.
            os.close(self._rendezvous)

    def _tell(self, message: RankMessage) -> None:
        frame = encode(message)
        for rank in self._ranks:
            rank.channel.send_encoded(frame)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _start_and_watch(self) -> None:
        try:
            self._ranks.extend(RankProcess(rank, self._rendezvous) for rank in range(1, self._size))
        except OSError as error:
            self._error = error
            self.close()
        finally:
            self._are_begun.set()
        if self._error is None:
            self._watch()

    def _watch(self) -> None:
        poll = select.poll()
        for rank in self._ranks:
            poll.register(rank.pidfd, select.POLLIN)
        for look in itertools.count(1):
            poll.poll(_LOOK_S * 1000)
            if self._is_closed:
                return
            if ended := [rank for rank in self._ranks if rank.has_ended]:
                return self._lost(ended[0])
            for rank in self._ranks if look % _LOOKS_A_TICK == 0 else ():
                if complaint := rank.tick():
                    log.error("rank %d %s: it is killed", rank.rank, complaint)
                    rank.process.kill()

    def _lost(self, rank: RankProcess) -> None:
        """End this process as the rank has ended."""
        if self._is_closed:
            return
        self._ended.set_result(rank)
        if not self._is_started:
            self._lost_early(rank)
            return
        log.error("rank %d has ended %s: the engine ends as well", rank.rank, rank.end)
        self._on_lost(rank.code)

    def _lost_early(self, rank: RankProcess) -> None:
        """Report why a rank that has ended could not start, unless this rank does."""
        if rank.process.wait() >= 0:
            # Where this rank waits for the other one on its socket, it reports the reason by itself.
            time.sleep(_GRACE_S)
        if self._is_refused:
            return
        if self._on_refused is not None:
            self._on_refused(_last_words(rank))
        else:
            # What fails by it reads the reason.
            self._group.abort()


def _last_words(rank: RankProcess) -> str:
    """Return why a rank that has ended could not start."""
    try:
        while True:
            if isinstance(message := rank.channel.receive(), RankRefused):
                return _reason(rank, message)
    except EOFError:
        return rank.early_end


def _reason(rank: RankProcess, refused: RankRefused) -> str:
    return f"rank {rank.rank}: {refused.message}"
