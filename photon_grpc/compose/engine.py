"""The engine process: loads the model, then computes steps until nobody is left.

Started by the supervisor: `python -m photon_grpc.compose.engine CONTROL_FD SUPERVISOR_PID`.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable

from photon_grpc.bridge.codec import max_frame_bytes
from photon_grpc.bridge.control import CannotStart, ControlChannel, ControlMessage, Progress, Ready
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.bridge.supervisor import CANNOT_START, enter_child
from photon_grpc.compose.console import log_to_stderr
from photon_grpc.config.flags import ServeConfig
from photon_grpc.errors import StartupError

log = logging.getLogger(__name__)

#: Parameters below which a second thread is not worth waking: the embedded model (6.6 million)
#: made 385 tokens/s with one and 354 with two, both cores idle, and 412 and 172 with one of them busy.
_SMALL_MODEL = 50_000_000

#: Loading reports at most this often, and whenever a stage begins or ends.
_REPORT_INTERVAL_S = 0.1


def main(argv: list[str]) -> int:
    """The exit code: 0 when told to stop, CANNOT_START after a StartupError; what else is raised is a crash."""
    control, begin, said = enter_child(argv)
    try:
        _run(begin.config, control, said)
    except StartupError as error:
        control.send(CannotStart(str(error)))
        return CANNOT_START
    except EOFError:
        return 0
    except Exception:
        log.exception("the engine cannot go on")
        # Where a device is lost, releasing what it holds may hang; front ends are to see their sockets end now.
        os._exit(1)
    return 0


def _run(config: ServeConfig, control: ControlChannel, said: list[ControlMessage]) -> None:
    log_to_stderr(config.server.log_level, "engine")
    limit_threads()
    # Only now: torch reads the number of threads when it is imported.
    from photon_grpc.compose.assemble import assemble

    assembled = assemble(config, _reporter(control))
    settle_threads(assembled.num_parameters)
    host = BridgeHost(control, max_frame_bytes=max_frame_bytes(config.server.max_message_size))
    engine = assembled.engine(host, host)
    # What is alive now stays: the collector need not look at weights, modules and graphs again.
    gc.collect()
    gc.freeze()
    control.send(Ready(assembled.facts))
    host.obey(said)
    host.announce(assembled.facts)
    engine.run()


def limit_threads() -> None:
    """As many torch threads as this process has cores, and they soon sleep where they wait, unless OMP_* or GOMP_* says otherwise.

    torch would count the machine's cores, also in a container that has two of them. GNU's threads spin for milliseconds at the end of every
    operation, which is a little faster on idle cores and ruinous on shared ones. Llama-3.2-1B's shape on two cores, ms a step with both
    idle / one busy: 57 / 128 as it is, 58 / 75 spinning briefly, 61 / 70 never.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(available_cores()))
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def settle_threads(num_parameters: int) -> None:
    """One thread for a model whose operations are over before a second one has woken up."""
    if num_parameters < _SMALL_MODEL:
        import torch

        torch.set_num_threads(1)


def available_cores() -> int:
    """Cores that this process may use: its affinity, and its share where a control group limits it."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _reporter(control: ControlChannel) -> Callable[[str, int, int], None]:
    last_s = 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last_s
        if 0 < done < total and time.monotonic() - last_s < _REPORT_INTERVAL_S:
            return
        last_s = time.monotonic()
        control.send(Progress(stage, done, total))

    return progress


if __name__ == "__main__":
    sys.exit(main(sys.argv))
