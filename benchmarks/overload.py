"""Measure a service beyond saturation: goodput at ten times the load, and what it is to be a neighbour then.

    python -m benchmarks.overload [--rounds 3] [--seconds 10] [-- FLAGS OF serve]

One service with two API keys. Of one come, in turn, so that what else the machine does meets both: three callers a
seat, one request after another (saturation), and Poisson arrivals at ten times the rate that those had (open loop, no
retries). Of the other key, one request after another, a token each: its time to first token, alone and beside them.
Health is checked all the while. Goodput is output tokens of requests that were answered in full: a second, and for each
second of CPU that the service took, which says the same on a machine that others use. Clients and service share it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import workloads
from benchmarks.saved import add_save_flag, saved
from benchmarks.service import engine_cpu_s, frontend_cpu_s, serving
from photon_grpc.cli.load.load import Percentiles, RequestResult, Session, Turn, Workload, run_load, summarize
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

SEATS, QUEUE = 8, 32
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
#: Ids of the embedded model's vocabulary that are no special tokens.
_IDS = range(10, 1000)
_PAUSE_S = 0.02
_TIMEOUT_S = 120.0


_TITLES = (
    *("load", "goodput tok/s", "tok / CPU s", "front end's share of CPU", "answered", "refused"),
    "refused within p50 / p99 ms",
    "neighbour's first token p50 / p99 ms",
    *("health p50 / p99 ms", "neighbour's failures"),
)


@dataclass
class Beside:
    """Seconds of the neighbour's calls during one load."""

    first_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    num_failed: int = 0

    def row(self) -> str:
        first, health = Percentiles.of(self.first_s), Percentiles.of(self.health_s)
        return f"{_ms(first)} | {_ms(health)} | {self.num_failed}"


class Neighbour:
    """The caller with the other key, in this process."""

    def __init__(self, target: str, key: str) -> None:
        self._target = target
        self._metadata = (("authorization", f"Bearer {key}"),)

    async def beside(self, load: Awaitable[list[RequestResult]]) -> tuple[list[RequestResult], Beside]:
        told = Beside()
        own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with (
            grpc.aio.insecure_channel(self._target, own) as first,
            grpc.aio.insecure_channel(self._target, own) as second,
        ):
            generate = inference_pb2_grpc.InferenceServiceStub(first).Generate
            check = health_pb2_grpc.HealthStub(second).Check
            request = inference_pb2.GenerateRequest(token_ids={"ids": list(_IDS)[:PROMPT_TOKENS]})
            request.stop.max_tokens = 1
            calling = [
                asyncio.create_task(
                    _repeat(lambda: generate(request, metadata=self._metadata, timeout=_TIMEOUT_S), told, told.first_s)
                ),
                asyncio.create_task(
                    _repeat(lambda: check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S), told, told.health_s)
                ),
            ]
            try:
                return await load, told
            finally:
                for task in calling:
                    task.cancel()
                await asyncio.gather(*calling, return_exceptions=True)


async def _repeat(call: Callable[[], Awaitable[object]], told: Beside, times: list[float]) -> None:
    while True:
        began_s = time.perf_counter()
        try:
            await call()
        except grpc.aio.AioRpcError:
            told.num_failed += 1
        times.append(time.perf_counter() - began_s)
        await asyncio.sleep(_PAUSE_S)


def _turn(number: int) -> Turn:
    ids = workloads.prompt(1, number, PROMPT_TOKENS)
    return Turn([_IDS[int(token) % len(_IDS)] for token in ids], OUTPUT_TOKENS)


def _arrivals(rate: float, seconds: float, draw: random.Random) -> list[Session]:
    sessions: list[Session] = []
    start_s = draw.expovariate(rate)
    while start_s < seconds:
        sessions.append(Session([_turn(draw.randrange(1 << 20))], start_s))
        start_s += draw.expovariate(rate)
    return sessions


def _workload(target: str, sessions: Sequence[Session], concurrency: int | None = None) -> Workload:
    return Workload(target, sessions, concurrency, salt=f"overload-{time.time_ns()}", timeout_s=_TIMEOUT_S)


def _closed(target: str, num_requests: int, draw: random.Random) -> Workload:
    """With a seat or a place in the queue for every caller."""
    return _workload(target, [Session([_turn(draw.randrange(1 << 20))]) for _ in range(num_requests)], 3 * SEATS)


async def _measure(target: str, neighbour: Neighbour, rounds: int, seconds: float) -> None:
    draw = random.Random(1)
    rate = summarize(await run_load(_closed(target, 6 * SEATS, draw))).requests_per_s
    print(f"\n{rate:.1f} requests a second of {PROMPT_TOKENS} ids in, {OUTPUT_TOKENS} tokens out\n")
    print(f"| {' | '.join(_TITLES)} |\n|--{'|--:' * (len(_TITLES) - 1)}|")
    _, alone = await neighbour.beside(asyncio.sleep(seconds, []))
    print(f"| nobody {'| – ' * 6}| {alone.row()} |")
    ratios = []
    for _ in range(rounds):
        closed = _closed(target, max(6 * SEATS, int(rate * seconds)), draw)
        rate, at_saturation = await _goodput("saturation", closed, neighbour)
        _, beyond = await _goodput("10 ×", _workload(target, _arrivals(10 * rate, seconds, draw)), neighbour)
        ratios.append(beyond / at_saturation)
    told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"\ngoodput for each CPU s, at 10 × / at saturation: median {statistics.median(ratios):.2f} of {told}")


async def _goodput(name: str, load: Workload, neighbour: Neighbour) -> tuple[float, float]:
    """Requests a second, and output tokens for each CPU second of the service; prints a row."""
    engine_s, frontend_s = engine_cpu_s(load.target), frontend_cpu_s(load.target)
    answers, beside = await neighbour.beside(run_load(load))
    engine_s, frontend_s = engine_cpu_s(load.target) - engine_s, frontend_cpu_s(load.target) - frontend_s
    summary = summarize(answers)
    goodput = summary.output_tokens / (engine_s + frontend_s)
    refused = Percentiles.of([answer.total_s for answer in answers if answer.reason == "QUEUE_FULL"])
    cells = [
        name,
        f"{summary.output_tokens_per_s:,.0f}",
        f"{goodput:,.0f}",
        f"{frontend_s / (engine_s + frontend_s):.0%}",
    ]
    cells += [f"{summary.completed}", f"{summary.failed}", _ms(refused), beside.row()]
    print(f"| {' | '.join(cells)} |", flush=True)
    for reason in summary.failures.keys() - {"QUEUE_FULL"}:
        print(f"{summary.failures[reason].count} failed with {reason}: {summary.failures[reason].message}")
    return summary.requests_per_s, goodput


def _ms(percentiles: Percentiles) -> str:
    return f"{percentiles.p50 * 1e3:.0f} / {percentiles.p99 * 1e3:.0f}" if percentiles.p99 else "–"


def _write_keys(path: Path) -> dict[str, str]:
    """Two keys and their file; returns name -> key."""
    made = {name: secrets.token_urlsafe(16) for name in ("flood", "neighbour")}
    blocks = [
        f"[[key]]\nname = {json.dumps(name)}\nsha256 = {json.dumps(hashlib.sha256(key.encode()).hexdigest())}\n"
        'scopes = ["generate"]\n'
        for name, key in made.items()
    ]
    path.write_text("\n".join(blocks))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="of serve, after --")
    add_save_flag(parser)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        stack.enter_context(saved(args.save))
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        keys = _write_keys(Path(directory) / "keys.toml")
        sizes = ("--max-num-seqs", str(SEATS), "--max-queue-size", str(QUEUE))
        flags = (*sizes, "--api-keys-file", f"{directory}/keys.toml", "--device", "cpu", *args.flags)
        target = stack.enter_context(serving(*flags))
        # Client processes have it from there.
        os.environ["PHOTON_API_KEY"] = keys["flood"]
        asyncio.run(_measure(target, Neighbour(target, keys["neighbour"]), args.rounds, args.seconds))


if __name__ == "__main__":
    main()
