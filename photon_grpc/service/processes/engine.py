"""The engine process, which loads the model and computes steps until the last front end is gone.

The supervisor starts it with the flight record as its shared file (`child.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from photon_grpc.bridge.codec import max_frame_bytes
from photon_grpc.bridge.control import ControlChannel, LoadingProgress, Ready
from photon_grpc.bridge.flight_recorder import SharedFlightRecorder
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.compose.rank_process import StartedRanks, start_ranks
from photon_grpc.compose.threads import limit_threads
from photon_grpc.compose.triton_import import skip_triton
from photon_grpc.config.flags import ServeConfig
from photon_grpc.core.ports import EnginePorts
from photon_grpc.engine.scheduler.quarantine import Quarantine
from photon_grpc.errors import StartupError
from photon_grpc.service.logs.log_pipe import log_to_stderr
from photon_grpc.service.processes import address_space
from photon_grpc.service.processes.child import ChildContext, enter_child

log = logging.getLogger(__name__)

#: Least interval of reports while loading, except when a stage begins or ends.
_REPORT_INTERVAL_S = 0.1
#: Time until the first turn of the engine's loop.
_FIRST_TURN_S = 60.0
#: Time for the compilation of a kernel while serving.
_COMPILATION_S = 600.0
#: More are started only once it is known that there are GPUs for them: each imports torch.
_MOST_RANKS = 8


def main(argv: list[str]) -> int:
    """Run the engine; return 0 after a stop, CANNOT_START after a StartupError. Other exceptions are crashes."""
    context = enter_child(argv)
    try:
        _run(context)
    except StartupError as error:
        return context.refuse(str(error))
    except EOFError:
        return 0
    except Exception as error:
        if address_space.is_met_by(error):
            # Handled as a StartupError; an engine that has worked before is restarted.
            os._exit(context.refuse(address_space.advice("the engine")))
        log.exception("the engine cannot continue")
        # If a device is lost, releasing its memory may hang; front ends must see their sockets end now.
        os._exit(1)
    return 0


def _run(context: ChildContext) -> None:
    control, config, heartbeat = context.control, context.begin.config, context.heartbeat
    log_to_stderr(config.server.log_level, "engine", log_format=config.server.log_format)
    limit_threads(config.parallel.num_ranks)
    # First of all: they import torch while this process does. This thread ends with the process.
    started = _started(config)
    # What modules create stays; collections would look through all of it, also those while it is loaded.
    gc.disable()
    skip_triton(config.device)
    # Only now: torch reads the number of threads when it is imported.
    from photon_grpc.compose.assemble import assemble
    from photon_grpc.compose.leading_rank import ranks_of
    from photon_grpc.kernels.lang.jit import BEFORE_COMPILATION

    gc.freeze()
    gc.enable()
    hosts: list[BridgeHost] = []
    ranks = ranks_of(config, partial(_refuse, context), partial(_end_as, hosts), started)
    assembled = assemble(config, _reporter(control), ranks)
    host = BridgeHost(control, max_frame_bytes=max_frame_bytes(config.server.max_message_size))
    hosts.append(host)
    recorder = SharedFlightRecorder(*context.shared)
    quarantine = Quarantine(recorder, host.wake, recorder.last.suspects, recorder.last.known)
    engine = assembled.engine(EnginePorts(host, host, heartbeat), quarantine)
    BEFORE_COMPILATION.set(lambda: heartbeat.beat(_COMPILATION_S))
    # Weights, modules and graphs stay; exclude them from later collections.
    gc.collect()
    gc.freeze()
    heartbeat.beat(_FIRST_TURN_S)
    control.send(Ready(assembled.facts))
    host.obey(context.messages)
    host.announce(assembled.facts)
    try:
        engine.run()
        if config.parallel.num_ranks > 1:
            ranks.close()
        # What libraries release at the end of a process takes a second, and may wait for the other ranks.
        os._exit(0)
    finally:
        # The last collection must see all objects: nanobind, in Triton, reports others as leaked.
        gc.unfreeze()


def _started(config: ServeConfig) -> StartedRanks | None:
    """Start the processes of the other ranks, if they are few. Raise StartupError."""
    if config.parallel.num_ranks not in range(2, _MOST_RANKS + 1):
        return None
    try:
        return start_ranks(config, os.environ["OMP_NUM_THREADS"])
    except OSError as error:
        raise StartupError(f"a process for another rank cannot be started: {error}") from error


def _refuse(context: ChildContext, reason: str) -> None:
    """End this process, whose main thread may wait for a rank that has ended."""
    os._exit(context.refuse(reason))


def _end_as(hosts: Sequence[BridgeHost], code: int) -> None:
    """End this process as a rank of it has ended: who sent that a signal, not a request, is the cause."""
    for host in hosts:
        host.hang_up()
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(1)


def _reporter(control: ControlChannel) -> Callable[[str, int, int], None]:
    last_s = 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last_s
        if 0 < done < total and time.monotonic() - last_s < _REPORT_INTERVAL_S:
            return
        last_s = time.monotonic()
        control.send(LoadingProgress(stage, done, total))

    return progress


if __name__ == "__main__":
    sys.exit(main(sys.argv))
