"""The process of a rank beside the engine process, which starts it (`compose/leading_rank.py`)."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import time

from photon_grpc.bridge.heartbeat import TICK_S, SharedHeartbeat
from photon_grpc.bridge.ranks import BeginRank, RankChannel, RankRefused
from photon_grpc.compose.triton_import import skip_triton
from photon_grpc.errors import StartupError
from photon_grpc.service.logs.log_pipe import log_to_stderr
from photon_grpc.service.processes.child import CANNOT_START, behave_as_child

log = logging.getLogger(__name__)

#: A rank whose threads all stand still for longer is ended. Loading a kernel for the first time may keep them waiting;
#: rank 0 sees by itself that a process is stopped.
_SILENCE_S = 10.0


def main(argv: list[str]) -> int:
    """Compute until rank 0 is gone; return the exit code."""
    parent, fd, heartbeat_fd, rendezvous = map(int, argv[1:])
    behave_as_child(parent, fd, heartbeat_fd, rendezvous)
    channel = RankChannel(socket.socket(fileno=fd))
    try:
        _run(channel, SharedHeartbeat(heartbeat_fd), rendezvous)
    except StartupError as error:
        channel.send(RankRefused(str(error)))
        return CANNOT_START
    except (EOFError, BrokenPipeError):
        return 0
    except Exception:
        log.exception("the rank cannot continue")
        # As in the engine process: releasing a lost device may hang.
        os._exit(1)
    return 0


def _run(channel: RankChannel, heartbeat: SharedHeartbeat, rendezvous: int) -> None:
    begin = channel.receive()
    if not isinstance(begin, BeginRank):
        raise TypeError(f"rank 0 began with {begin}")
    config, rank = begin.config, begin.rank
    log_to_stderr(config.server.log_level, f"rank {rank}", log_format=config.server.log_format)
    # Only now, since it takes seconds: rank 0 imports the same meanwhile.
    skip_triton(config.device)
    from photon_grpc.compose.following_rank import FollowingRank, follow

    following = FollowingRank(config, rank, rendezvous, channel)
    runner = following.load()
    heartbeat.beat(_SILENCE_S)
    threading.Thread(target=_beat, args=(heartbeat,), name="heartbeat", daemon=True).start()
    # Rank 0 begins once it watches all heartbeats.
    following.minimum(0)
    try:
        follow(channel, runner)
    finally:
        gc.unfreeze()


def _beat(heartbeat: SharedHeartbeat) -> None:
    """Tell rank 0 that this process runs; a step that hangs is noticed there."""
    while True:
        heartbeat.beat(_SILENCE_S)
        time.sleep(TICK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
