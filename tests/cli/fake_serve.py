"""Stands in for `photon-grpc serve`: the flags it is given, the lines it says, the ways it ends."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc

from photon_grpc.v1 import inference_pb2 as pb
from tests.client.fake_server import FakeServer, Refusal, message, serving


def say(text: str) -> None:
    print(f"12:34:56 {text}", file=sys.stderr, flush=True)


async def main(address: str, behaviour: str) -> int:
    say("loading: weights 40 %")
    if behaviour == "cannot-start":
        say("cannot start: the weights are somewhere else")
        return 2
    if behaviour == "imports":
        await asyncio.sleep(60)
    first = message("\n    return", start=True)
    script = {
        "broken": [Refusal(code=grpc.StatusCode.INTERNAL, message="broken")],
        "stalls": [first, "hang"],
    }.get(behaviour, [first, message(" n", finish=pb.FINISH_REASON_EOS)])
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    fake = FakeServer(script)
    fake.ready = behaviour != "never-ready"
    async with serving(fake, address):
        if behaviour == "dies":
            await fake.ended.wait()
            await asyncio.sleep(0.5)
            return 3
        await stop.wait()
    say("stopped")
    return 0


if __name__ == "__main__":
    address = sys.argv[sys.argv.index("--listen") + 1]
    behaviour = next((flag.removeprefix("--model=") for flag in sys.argv if flag.startswith("--model=")), "")
    sys.exit(asyncio.run(main(address, behaviour)))
