"""The engine process: loads the model, then computes steps until the last front end is gone.

Started by the supervisor with the flight record as its shared file (`child.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable

from photon_grpc.bridge.codec import max_frame_bytes
from photon_grpc.bridge.control import ControlChannel, LoadingProgress, Ready
from photon_grpc.bridge.flight_recorder import SharedFlightRecorder
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.compose.threads import limit_threads
from photon_grpc.core.ports import EnginePorts
from photon_grpc.engine.scheduler.quarantine import Quarantine
from photon_grpc.errors import StartupError
from photon_grpc.service.logs.log_pipe import log_to_stderr
from photon_grpc.service.processes import address_space
from photon_grpc.service.processes.child import ChildContext, enter_child

log = logging.getLogger(__name__)

#: Loading reports at most this often, and whenever a stage begins or ends.
_REPORT_INTERVAL_S = 0.1
#: Time for the engine's loop to its first turn.
_FIRST_TURN_S = 60.0
#: Time for the compilation of a kernel while serving.
_COMPILATION_S = 600.0


def main(argv: list[str]) -> int:
    """Return the exit code: 0 when told to stop, CANNOT_START after a StartupError; what else is raised is a crash."""
    context = enter_child(argv)
    try:
        _run(context)
    except StartupError as error:
        return context.refuse(str(error))
    except EOFError:
        return 0
    except Exception as error:
        if address_space.is_met_by(error):
            # As every StartupError; where it has worked before, a line and a new start.
            os._exit(context.refuse(address_space.told("the engine")))
        log.exception("the engine cannot go on")
        # Where a device is lost, releasing what it holds may hang; front ends are to see their sockets end now.
        os._exit(1)
    return 0


def _run(context: ChildContext) -> None:
    control, config, heartbeat = context.control, context.begin.config, context.heartbeat
    log_to_stderr(config.server.log_level, "engine", log_format=config.server.log_format)
    limit_threads()
    # Only now: torch reads the number of threads when it is imported.
    from photon_grpc.compose.assemble import assemble
    from photon_grpc.kernels.lang.jit import BEFORE_COMPILATION

    assembled = assemble(config, _reporter(control))
    host = BridgeHost(control, max_frame_bytes=max_frame_bytes(config.server.max_message_size))
    recorder = SharedFlightRecorder(*context.shared)
    quarantine = Quarantine(recorder, host.wake, recorder.last.suspects, recorder.last.known)
    engine = assembled.engine(EnginePorts(host, host, heartbeat), quarantine)
    BEFORE_COMPILATION.set(lambda: heartbeat.beat(_COMPILATION_S))
    # Weights, modules and graphs stay: the collector need not look at them again.
    gc.collect()
    gc.freeze()
    heartbeat.beat(_FIRST_TURN_S)
    control.send(Ready(assembled.facts))
    host.obey(context.said)
    host.announce(assembled.facts)
    try:
        engine.run()
    finally:
        # The interpreter ends by collecting; libraries report what it does not look at as leaked (nanobind, in Triton).
        gc.unfreeze()


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
