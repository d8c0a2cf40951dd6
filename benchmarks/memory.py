"""Memory of a service's processes over very many small requests.

    python -m benchmarks.memory [--requests 100000] [--every 5000] [--save NAME] [-- FLAGS OF serve]

Requests of 1 to 59 ids and 1 to 8 tokens, greedy, drawn and filtered, some with two outputs, 24 at a time. A row of MiB
resident in each process of the service every so many requests: a column that goes on rising is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from benchmarks import service
from benchmarks.saved import add_save_flag, saved
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

_CALLERS = 24
_SAMPLINGS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9})


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def processes(supervisor: int) -> dict[str, int]:
    """The supervisor's children: name -> process id."""
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2].decode() for pid in map(int, children)}
    return {f"{name.rpartition('.')[2]} {number}": pid for number, (pid, name) in enumerate(names.items())}


def drawn(draw: random.Random, vocab_size: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(draw.randrange(vocab_size) for _ in range(draw.randrange(1, 60)))
    request.sampling.MergeFrom(inference_pb2.SamplingParams(**draw.choice(_SAMPLINGS)))
    request.sampling.num_outputs = draw.choice((1,) * 9 + (2,))
    request.stop.max_tokens = draw.randrange(1, 9)
    request.stop.min_tokens = draw.randrange(2)
    return request


async def send(address: str, num_requests: int, every: int, pids: dict[str, int]) -> None:
    draw, vocab_size, begun_s = random.Random(1), service.vocab_size(address), time.monotonic()
    numbers = iter(range(1, num_requests + 1))

    async def call(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        for number in numbers:
            await stub.Generate(drawn(draw, vocab_size))
            if number % every == 0:
                row(number)

    def row(number: int) -> None:
        sizes = (f"{resident_mib(pid):.1f}" for pid in pids.values())
        print(f"| {number} | {time.monotonic() - begun_s:.0f} | {' | '.join(sizes)} |", flush=True)

    print(f"| requests | s | {' | '.join(pids)} |\n|---|---|{'---|' * len(pids)}")
    row(0)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(call(stub) for _ in range(_CALLERS)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory of a service's processes over very many small requests.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=5_000)
    parser.add_argument("flags", nargs="*", help="flags of serve, behind --")
    add_save_flag(parser)
    args = parser.parse_args(arguments)
    address = service.free_address()
    process = service.start(address, "--log-level", "warning", *args.flags)
    try:
        service.wait_until_ready(address, process, 300.0)
        with saved(args.save):
            asyncio.run(send(address, args.requests, args.every, processes(process.pid)))
    finally:
        service.stop(process)


if __name__ == "__main__":
    main()
