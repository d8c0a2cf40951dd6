"""Measure what the Python client costs over the raw stubs: rates and CPU per token of many streams, latency of one
call, memory of open streams.

    python -m benchmarks.clients_python [--save NAME]

The server is a process of its own that says what a script says: a token a message, as fast as it is read. CPU is that
of the client's process. Rounds of all kinds are mixed, so that a busy machine is busy for all.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.saved import add_save_flag, saved
from photon_grpc.client import Client, SyncClient
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc

STREAMS = (1, 64, 256)
#: Of a round, over all its streams.
TOKENS = 8192
ROUNDS = 3
CALLS = 300
OPEN_STREAMS = 1000


class Script(inference_pb2_grpc.InferenceServiceServicer):
    """`max_tokens` messages of one token each; none but the first where `ignore_eos` is set."""

    async def Generate(self, request: Any, context: Any) -> Any:
        return pb.GenerateResponse(outputs=[pb.Output(text="token", finish=pb.Finish(reason=4))])

    async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for number in range(request.stop.max_tokens):
            yield said(request, number)
            if request.stop.ignore_eos:
                await asyncio.sleep(3600)

    async def MultiplexGenerate(self, actions: Any, context: Any) -> None:
        """A frame a step, an item for each request in flight."""
        running: dict[int, list[Any]] = {}

        async def read() -> None:
            async for action in actions:
                if action.HasField("generate"):
                    running[len(seen)] = [action.generate, 0]
                    seen.append(action.generate.request_id)

        seen: list[str] = []
        reading = asyncio.create_task(read())
        while not reading.done():
            frame = pb.MultiplexGenerateResponse()
            for handle, (request, number) in list(running.items()):
                frame.items.add(handle=handle, request_id=seen[handle], response=said(request, number))
                running[handle][1] += 1
                if number + 1 == request.stop.max_tokens:
                    del running[handle]
            await (context.write(frame) if frame.items else asyncio.sleep(0.001))


def said(request: Any, number: int) -> Any:
    message = pb.StreamGenerateResponse(sequence=number + 1)
    delta = message.deltas.add(text=" token", token_ids=[number] if request.output.token_ids else [])
    if number == 0:
        message.start.request_id, message.start.seed = request.request_id or "r", 7
    if number + 1 == request.stop.max_tokens:
        delta.finish.reason = 4
        message.usage.output_tokens = number + 1
        message.timing.total_duration.FromMilliseconds(1)
    return message


async def serve() -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Script(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


# A round reads `num_streams` streams of `tokens` tokens each.


async def raw(target: str, num_streams: int, tokens: int) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one() -> None:
            async for message in stub.StreamGenerate(pb.GenerateRequest(text="x", stop={"max_tokens": tokens})):
                for delta in message.deltas:
                    assert delta.text

        await asyncio.gather(*(one() for _ in range(num_streams)))


async def drain(stream: Any) -> None:
    async for delta in stream:
        assert delta.text


async def plain(target: str, num_streams: int, tokens: int, *, resume: bool = True) -> None:
    async with Client(target, resume=resume) as client:
        await asyncio.gather(*(drain(client.stream("x", max_tokens=tokens)) for _ in range(num_streams)))


async def without_resume(target: str, num_streams: int, tokens: int) -> None:
    await plain(target, num_streams, tokens, resume=False)


async def multiplexed(target: str, num_streams: int, tokens: int) -> None:
    async with Client(target) as client, client.multiplex() as many:
        await asyncio.gather(*(drain(many.stream("x", max_tokens=tokens)) for _ in range(num_streams)))


async def threads(target: str, num_streams: int, tokens: int) -> None:
    def all_of_them() -> None:
        with SyncClient(target) as client, ThreadPoolExecutor(num_streams) as pool:

            def one(_: int) -> None:
                for delta in client.stream("x", max_tokens=tokens):
                    assert delta.text

            list(pool.map(one, range(num_streams)))

    await asyncio.to_thread(all_of_them)


KINDS: dict[str, Callable[[str, int, int], Awaitable[None]]] = {
    "raw stubs": raw,
    "Client, resume off": without_resume,
    "Client": plain,
    "Client, multiplexed": multiplexed,
    "SyncClient, a thread each": threads,
}


async def streams(target: str) -> list[str]:
    rows = []
    for num_streams in STREAMS:
        seen: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for _ in range(ROUNDS):
            for kind, read in KINDS.items():
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
                await read(target, num_streams, TOKENS // num_streams)
                seen[kind].append((time.perf_counter() - begun_s, time.process_time() - begun_cpu_s))
        base = statistics.median(cpu for _, cpu in seen["raw stubs"])
        for kind, rounds in seen.items():
            wall, cpu = (statistics.median(each) for each in zip(*rounds, strict=True))
            rows.append(
                f"| {num_streams} | {kind} | {TOKENS / wall:,.0f} | {cpu / TOKENS * 1e6:.1f} | {cpu / base:.2f} |"
            )
    return rows


async def latency(target: str) -> list[str]:
    request = pb.GenerateRequest(text="x", stop={"max_tokens": 1})
    async with grpc.aio.insecure_channel(target) as channel, Client(target) as client:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "raw stubs": lambda: stub.Generate(request),
            "Client": lambda: client.generate("x", max_tokens=1),
            "Client, hedged": lambda: client.generate("x", max_tokens=1, hedge_after=5),
        }
        took: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(CALLS):
            for name, call in calls.items():
                begun_s = time.perf_counter()
                await call()
                took[name].append(time.perf_counter() - begun_s)
    with SyncClient(target) as sync:
        took["SyncClient"] = []
        for _ in range(CALLS):
            begun_s = time.perf_counter()
            sync.generate("x", max_tokens=1)
            took["SyncClient"].append(time.perf_counter() - begun_s)
    base = statistics.median(took["raw stubs"])
    return [
        f"| {name} | {statistics.median(times) * 1e6:,.0f} | {(statistics.median(times) - base) * 1e6:+,.0f} |"
        for name, times in took.items()
    ]


async def memory(target: str) -> str:
    async with Client(target) as client:
        await client.generate("x")
        before = rss_bytes()
        opened = [client.stream("x", max_tokens=2, ignore_eos=True) for _ in range(OPEN_STREAMS)]
        await asyncio.gather(*(anext(stream) for stream in opened))
        each = (rss_bytes() - before) / OPEN_STREAMS
    return f"{OPEN_STREAMS:,} open streams take {each / 1024:.1f} KiB each in the client's process."


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def measure() -> str:
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.clients_python", "--serve"), stdout=asyncio.subprocess.PIPE
    )
    assert server.stdout is not None
    try:
        target = f"127.0.0.1:{int(await server.stdout.readline())}"
        open_streams = await memory(target)
        tables = [
            *("| streams | read by | tokens/s | CPU, µs a token | × raw stubs |", "|---|---|---|---|---|"),
            *await streams(target),
            *("", "| unary call by | p50, µs | over raw stubs, µs |", "|---|---|---|"),
            *await latency(target),
            *("", open_streams),
        ]
    finally:
        server.terminate()
        await server.wait()
    return "\n".join(tables)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    add_save_flag(parser)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    else:
        with saved(options.save):
            print(asyncio.run(measure()))
