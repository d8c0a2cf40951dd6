"""Rank 0 and the processes of the other ranks: their start, what it tells them, and the detection of their end.

A thread starts them and waits for their end: the system ends a child when the *thread* that started it ends. No rank
can go on without the others, and rank 0 may be waiting for one on the device, so that thread reports their end.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from photon_grpc.bridge.codec import encode
from photon_grpc.bridge.heartbeat import TICK_S
from photon_grpc.bridge.ranks import (
    Launch,
    Minimum,
    RankMessage,
    RankRefused,
    RankValue,
    ReadStep,
    SharedMasks,
)
from photon_grpc.compose.assemble import check_parallel, mesh_sizes, pick_device
from photon_grpc.compose.rank_process import RankProcess, StartedRanks, start_ranks
from photon_grpc.compose.split_model import check_split
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.batch import Batch
from photon_grpc.core.ports import Runner
from photon_grpc.errors import StartupError
from photon_grpc.layers.parallel.processes import ProcessMesh
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.ranks import ALONE, LeadingRanks, LeadingRunner

log = logging.getLogger(__name__)

#: Time for rank 0 to report by itself why a rank could not start, before the thread that watches ends it.
_GRACE_S = 2.0
#: Time for that thread to report the end of a rank before what failed by it.
_REPORT_S = 1.0
#: Time in which it notices an end, and its interval of looking for one.
_NOTICE_S, _LOOK_S = 0.1, 0.02
_LOOKS_A_TICK = round(TICK_S / _LOOK_S)


def ranks_of(
    config: ServeConfig,
    on_refused: Callable[[str], None] | None = None,
    on_lost: Callable[[int], None] | None = None,
    started: StartedRanks | None = None,
) -> LeadingRanks:
    """Lead the other ranks that the settings ask for; arguments as of LeadingRank.

    By default what waits for a rank that has ended fails.

    Raise ConfigError and ModelLoadError for what cannot be split so, before a process is started here; StartupError if
    one cannot be, and where another model of this process is on several ranks.
    """
    try:
        device = pick_device(config.device.device)
        check_parallel(config.parallel, device)
        if config.parallel.num_ranks == 1:
            return ALONE
        check_split(config, on_cuda=device.type == "cuda")
        ProcessMesh.refuse_another()
    except BaseException:
        if started is not None:
            started.close()
        raise
    return LeadingRank(config, on_refused, on_lost, started)


class OneRank:
    """This process as one of several ranks; `mesh` has their groups."""

    def __init__(self, rank: int, config: ServeConfig, rendezvous: int) -> None:
        self._group = ProcessMesh(rank, mesh_sizes(config.parallel), rendezvous)
        self.mesh = self._group.mesh

    def alone(self) -> AbstractContextManager[None]:
        return self._group.alone()

    def join(self, device: torch.device, hidden_size: int) -> None:
        self._group.join(device, hidden_size)

    def leave(self) -> None:
        """Leave the group."""
        self._group.leave()


class LeadingRank(OneRank):
    """Rank 0 and the processes of the others.

    Args:
        on_refused: called with the reason why the ranks cannot start, while this rank may wait for them.
        on_lost: called with the exit code of a rank that has ended after the start; negative for a signal.
        started: their processes, of a thread that ends with this process; started here by default.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_refused: Callable[[str], None] | None = None,
        on_lost: Callable[[int], None] | None = None,
        started: StartedRanks | None = None,
    ) -> None:
        self._config = config
        self._started = started
        self._on_refused = on_refused
        self._on_lost = on_lost or (lambda code: self._group.abort())
        self._is_started = self._is_refused = self._is_closed = False
        #: The first rank that has ended.
        self._ended: Future[RankProcess] = Future()
        self._met: Future[None] = Future()
        self._are_begun, self._is_made = threading.Event(), threading.Event()
        self._error: OSError | None = None
        self._watcher = threading.Thread(target=self._start_and_watch, name="ranks", daemon=True)
        self._watcher.start()
        self._are_begun.wait()
        if self._started is None:
            raise StartupError(f"a process for another rank cannot be started: {self._error}")
        self._rendezvous = self._started.rendezvous
        try:
            super().__init__(0, config, self._rendezvous)
        except StartupError:
            # Another thread was first.
            self._is_closed = True
            self._started.close()
            raise
        finally:
            self._is_made.set()
        self._masks = SharedMasks([rank.channel for rank in self._ranks])

    @property
    def _ranks(self) -> list[RankProcess]:
        return [] if self._started is None else self._started.processes

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    # -- the start -----------------------------------------------------------------------------------------------------

    def minimum(self, number: int) -> int:
        for rank in self._ranks:
            number = min(number, self._value_of(rank))
        self._send(Minimum(number))
        return number

    def _value_of(self, rank: RankProcess) -> int:
        try:
            message = rank.channel.receive()
        except EOFError:
            self._is_refused = True
            raise StartupError(rank.early_end) from None
        if isinstance(message, RankRefused):
            self._is_refused = True
            raise StartupError(_reason(rank, message))
        if not isinstance(message, RankValue):
            raise TypeError(f"rank {rank.rank} sent {message}")
        return message.number

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Compute alone, then let the others start: they find all kernels compiled."""
        yield
        self.minimum(0)

    def join(self, device: torch.device, hidden_size: int) -> None:
        """Connect to the others, in a thread, because the libraries keep waiting for a rank that has ended.

        Raise StartupError as soon as one has.
        """
        self._met.set_running_or_notify_cancel()
        threading.Thread(target=self._meet, args=(device, hidden_size), name="meeting", daemon=True).start()
        either: tuple[Future[Any], ...] = (self._met, self._ended)
        wait(either, return_when=FIRST_COMPLETED)
        if not self._met.done():
            self._is_refused = True
            raise StartupError(_early_end_reason(self._ended.result()))
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
        return StartupError(_early_end_reason(self._ended.result())) if wait((self._ended,), report_s).done else None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def lead(self, runner: ModelRunner) -> Runner:
        # The others send their values behind their first heartbeats.
        self.minimum(0)
        self._is_started = True
        return LeadingRunner(runner, self)

    def mask_memory(self, device: torch.device) -> Callable[[int], memoryview]:
        return self._masks.allocate

    def launch(self, batch: Batch) -> None:
        self._send(Launch(batch))

    def sample(self, masks: memoryview) -> None:
        self._send(self._masks.message(masks))

    def read(self) -> None:
        self._send(ReadStep())

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

    def _send(self, message: RankMessage) -> None:
        frame = encode(message)
        for rank in self._ranks:
            rank.channel.send_encoded(frame)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _start_and_watch(self) -> None:
        try:
            self._started = self._started or start_ranks(self._config, str(torch.get_num_threads()))
        except OSError as error:
            self._error = error
        finally:
            self._are_begun.set()
        if self._started is not None:
            self._is_made.wait()
            if not self._is_closed:
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
                    rank.complaint = complaint
                    rank.process.kill()

    def _lost(self, rank: RankProcess) -> None:
        """End this process in the way the rank ended."""
        if self._is_closed:
            return
        self._ended.set_result(rank)
        if not self._is_started:
            self._lost_early(rank)
            return
        log.error("rank %d has ended %s: the engine ends as well", rank.rank, rank.end)
        self._on_lost(rank.code)

    def _lost_early(self, rank: RankProcess) -> None:
        """Report why a rank ended during its start, unless this rank reports it."""
        if rank.process.wait() >= 0:
            # Where this rank waits for the other one on its socket, it reports the reason by itself.
            time.sleep(_GRACE_S)
        if self._is_refused:
            return
        if self._on_refused is not None:
            self._on_refused(_early_end_reason(rank))
        else:
            # What fails by it reads the reason.
            self._group.abort()


def _early_end_reason(rank: RankProcess) -> str:
    """Return why a rank ended during its start."""
    try:
        while True:
            if isinstance(message := rank.channel.receive(), RankRefused):
                return _reason(rank, message)
    except EOFError:
        return rank.early_end


def _reason(rank: RankProcess, refused: RankRefused) -> str:
    return f"rank {rank.rank}: {refused.message}"
