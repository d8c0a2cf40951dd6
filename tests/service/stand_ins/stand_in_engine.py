"""An engine process without a model: told by STAND_IN_ENGINE how to behave."""

import os
import signal
import sys
import time

from photon_grpc.bridge.codec import max_frame_bytes
from photon_grpc.bridge.control import CannotStart, LoadingProgress, Ready
from photon_grpc.bridge.flight_recorder import SharedFlightRecorder
from photon_grpc.bridge.host import BridgeHost
from photon_grpc.core.frames import Facts
from photon_grpc.service.processes.child import CANNOT_START, enter_child
from tests.kv_plans import kv_plan

FACTS = Facts(128, 256, kv_plan(16), 8, 4, 64, 16, 1024, "cpu", "float32", kernels="torch")
#: Silence allowed.
ALLOWED_S = float(os.environ.get("STAND_IN_ENGINE_ALLOWED_S", "1.0"))


def main() -> None:
    control, begin, said, heartbeat, shared = enter_child(sys.argv)
    behaviour = os.environ.get("STAND_IN_ENGINE", "")
    control.send(LoadingProgress("weights", 1, 2))
    if behaviour == "cannot start":
        control.send(CannotStart("model.layers.0 is missing"))
        sys.exit(CANNOT_START)
    if behaviour == "crash":
        sys.exit(1)
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    host = BridgeHost(control, max_frame_bytes=max_frame_bytes(begin.config.server.max_message_size))
    # Before a test can stop this process: one that never beat is not missed.
    heartbeat.beat(ALLOWED_S)
    if "in a step" in behaviour:
        recorder = SharedFlightRecorder(*shared)
        recorder.admitted(1, 1, b"s" * 16)
        recorder.launching(3, (1,))
    control.send(Ready(FACTS))
    try:
        host.obey(said)
        host.announce(FACTS)
        if behaviour == "long step":
            heartbeat.beat(60.0, 2048)
            time.sleep(2 * ALLOWED_S)
        if behaviour == "deaf":
            time.sleep(60)
        while True:
            heartbeat.beat(ALLOWED_S)
            host.drain(0.2)
            while behaviour.startswith("hangs"):
                pass
    except EOFError:
        pass


main()
