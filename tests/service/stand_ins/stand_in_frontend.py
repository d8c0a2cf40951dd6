"""A front-end process without gRPC: ready when its engine is; told by STAND_IN_FRONTEND how to behave."""

import asyncio
import os
import sys
import time

from photon_grpc.bridge.client import BridgeClient
from photon_grpc.bridge.control import Bound, CannotStart, Counted, Drain, Drained, Link, Serving, Stop
from photon_grpc.core.stats import Load
from photon_grpc.service.processes.child import CANNOT_START, enter_child

#: Silence allowed.
ALLOWED_S = float(os.environ.get("STAND_IN_FRONTEND_ALLOWED_S", "1.0"))


async def serve() -> None:
    control, begin, said, heartbeat, _ = enter_child(sys.argv)
    behaviour = os.environ.get("STAND_IN_FRONTEND", "")
    if behaviour == "cannot start":
        control.send(CannotStart("the port is in use"))
        sys.exit(CANNOT_START)
    control.send(Bound(tuple(address.replace(":0", ":777") for address in begin.addresses), "stand-in"))
    control.set_blocking(False)
    client = BridgeClient(max_frame_bytes=1 << 20)
    garbage = [b"\xff" * 64] if behaviour == "garbage once" else []

    def is_joined(frame: object) -> None:
        control.send(Serving(True))
        if garbage:
            client._epoch.write(garbage.pop())

    client.listen(is_joined, lambda: control.send(Serving(False)))
    heartbeat.beat(ALLOWED_S)
    while True:
        for message in said:
            if isinstance(message, Link):
                await client.connect(control.take_socket())
            elif isinstance(message, Drain) and behaviour == "counts":
                for told in (Counted(1, Load()), Drained(0), Counted(2, Load())):
                    control.send(told)
            elif isinstance(message, Stop):
                control.send(Counted(3, Load()))
                return
            elif isinstance(message, Drain):
                await asyncio.sleep(60 if behaviour == "never drains" else 0)
                return
        heartbeat.beat(ALLOWED_S)
        if behaviour == "hangs":
            time.sleep(60)  # noqa: ASYNC251
        await asyncio.sleep(0.02)
        try:
            said = control.receive()
        except EOFError:
            return


asyncio.run(serve())
