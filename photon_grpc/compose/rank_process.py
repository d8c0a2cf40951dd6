"""The processes of the other ranks, seen from rank 0. No torch: they import it while rank 0 does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any, NamedTuple

from photon_grpc.bridge.heartbeat import TICK_S, Watchdog, exit_code, is_stopped, shared_file
from photon_grpc.bridge.ranks import BeginRank, RankChannel
from photon_grpc.config.flags import ServeConfig

#: What another rank runs: `python -m MODULE PID CHANNEL_FD HEARTBEAT_FD RENDEZVOUS_FD`.
MODULE = "photon_grpc.service.processes.rank"
#: A rank may be stopped for so long.
_STOPPED_S = 2.0


class StartedRanks(NamedTuple):
    """Processes that load their part of a model, and the file by which they find each other."""

    processes: list[RankProcess]
    rendezvous: int

    def close(self) -> None:
        for process in self.processes:
            process.close()
        os.close(self.rendezvous)


def start_ranks(config: ServeConfig, num_threads: str) -> StartedRanks:
    """Start all ranks but this one. Raise OSError if one cannot be.

    The system ends them when this *thread* ends.
    """
    started = StartedRanks([], shared_file("rendezvous"))
    try:
        for rank in range(1, config.parallel.num_ranks):
            started.processes.append(RankProcess(rank, started.rendezvous, num_threads))
            started.processes[-1].channel.send(BeginRank(config, rank))
    except OSError:
        started.close()
        raise
    return started


class RankProcess:
    """One of the other ranks: its process, its socket and its heartbeat."""

    #: Why rank 0 has killed it; "": it has not.
    complaint = ""

    def __init__(self, rank: int, rendezvous: int, num_threads: str) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.watchdog = Watchdog()
        self.channel = RankChannel(ours)
        files = theirs.fileno(), self.watchdog.fd, rendezvous
        command = [sys.executable, "-m", MODULE, str(os.getpid()), *map(str, files)]
        # As many threads as in rank 0: they are part of the numerics on a CPU.
        env = {**os.environ, "OMP_NUM_THREADS": num_threads}
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "pass_fds": files, "env": env}
        try:
            with theirs:
                # In a session of its own no signal of a terminal reaches it.
                self.process = subprocess.Popen(command, **options, start_new_session=True)
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            # A process that has begun ends with its socket.
            self.channel.close()
            self.watchdog.close()
            raise
        self._stopped_ticks = 0

    def tick(self) -> str:
        """Return an error message if it makes no progress, else "". Call every TICK_S."""
        self._stopped_ticks = self._stopped_ticks + 1 if is_stopped(self.process.pid) else 0
        if self._stopped_ticks * TICK_S >= _STOPPED_S:
            return f"was stopped from outside for {_STOPPED_S:.0f} s"
        return self.watchdog.tick()

    def close(self) -> None:
        """End it by closing its socket."""
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
        how = f"by {names.get(-code, f'signal {-code}')}" if code < 0 else f"with exit code {code}"
        return f"{how} from rank 0 (it {self.complaint})" if self.complaint else how

    @property
    def early_end(self) -> str:
        """Return the error message of an end before the first step."""
        return f"rank {self.rank} has ended {self.end} while it started"
