"""Three replicas under load, replaced one after the other: how many calls fail.

    python -m tests.service.rolling_restart --callers 24 --max-tokens 200 [--before PROGRAM] [--after PROGRAM]

With --before or --after the replicas, or those that replace them, are another program, such as another release.
One client, as any program has it: a list of addresses, and the service config of `clients/service_config.json` (round
robin, health checking, retries). Each caller sends unary calls and streams in turn, one after another, from before the
first replica is ended to after the last is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from photon_grpc.client.channel import MAX_RETRIES, open_channel
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.service.running import WITH_MODEL, RunningService, started
from tests.service.tiny import write_tiny_model

NUM_REPLICAS = 3
_CALL_TIMEOUT_S = 120.0
#: Several start at a time.
_START_LIMIT_S = 240.0


@dataclass
class Result:
    """Of all calls: `unary` and `stream` that were answered in full, and the failures of others."""

    answered: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    #: Seconds from a replica's SIGTERM to the readiness of its successor.
    replaced_s: list[float] = field(default_factory=list)

    def told(self) -> str:
        num_failed = self.failures.total()
        lines = [
            f"{num_failed} failures of {num_failed + self.answered.total()} calls "
            f"({self.answered['unary']} unary and {self.answered['stream']} streams were answered)",
            "replaced after " + ", ".join(f"{seconds:.1f} s" for seconds in self.replaced_s),
            *(f"{count} × {failure}" for failure, count in self.failures.items()),
        ]
        return "\n".join(lines)


def free_addresses(count: int) -> list[str]:
    """Of ports that no one has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def replica(model: Path, address: str, program: tuple[str, ...]) -> contextlib.AbstractContextManager[RunningService]:
    flags = ("--model", str(model), "--load-format", "dummy", "--num-blocks", "2048", "--device", "cpu")
    return started([*program, "serve", "--listen", address, "--admin-listen", "none", *flags])


async def replaced_under_load(
    model: Path,
    num_callers: int,
    max_tokens: int,
    program: tuple[str, ...] = WITH_MODEL,
    after: tuple[str, ...] = (),
) -> Result:
    """Start the replicas by `program`, call them, replace each by `after` (empty: the same)."""
    result = Result()
    addresses = free_addresses(NUM_REPLICAS)
    with contextlib.ExitStack() as stack:
        services = [stack.enter_context(replica(model, address, program)) for address in addresses]
        for service in services:
            await asyncio.to_thread(service.wait_ready, limit_s=_START_LIMIT_S)
        async with _calling(addresses, num_callers, max_tokens, result):
            for service, address in zip(services, addresses, strict=True):
                began_s = time.monotonic()
                code = await asyncio.to_thread(service.end)
                if code:
                    result.failures[f"a replica that ends with {code}"] += 1
                successor = stack.enter_context(replica(model, address, after or program))
                await asyncio.to_thread(successor.wait_ready, limit_s=_START_LIMIT_S)
                result.replaced_s.append(time.monotonic() - began_s)
    return result


@contextlib.asynccontextmanager
async def _calling(addresses: list[str], num_callers: int, max_tokens: int, result: Result) -> AsyncIterator[None]:
    """Callers call for as long as this lasts; the last calls are answered at its end."""
    is_over = asyncio.Event()
    async with open_channel(f"ipv4:{','.join(addresses)}", credentials=None, retries=MAX_RETRIES) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await asyncio.gather(*(_answered(stub, "unary", _asked(caller, 1)) for caller in range(num_callers)))
        callers = [_call_until(is_over, stub, caller, max_tokens, result) for caller in range(num_callers)]
        calling = asyncio.gather(*callers)
        try:
            yield
        finally:
            is_over.set()
            await calling


async def _call_until(
    is_over: asyncio.Event, stub: inference_pb2_grpc.InferenceServiceStub, caller: int, max_tokens: int, result: Result
) -> None:
    request = _asked(caller, max_tokens)
    kinds = itertools.cycle(("unary", "stream"))
    while not is_over.is_set():
        kind = next(kinds)
        try:
            num_tokens = await _answered(stub, kind, request)
        except grpc.aio.AioRpcError as error:
            result.failures[f"{kind}: {error.code().name} {error.details()}"] += 1
        else:
            where = result.answered if num_tokens == max_tokens else result.failures
            where[kind] += 1


def _asked(caller: int, max_tokens: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=f"def caller_{caller}")
    request.stop.max_tokens, request.stop.ignore_eos = max_tokens, True
    return request


async def _answered(stub: inference_pb2_grpc.InferenceServiceStub, kind: str, request: pb.GenerateRequest) -> int:
    """Output tokens of one call."""
    if kind == "unary":
        return int((await stub.Generate(request, timeout=_CALL_TIMEOUT_S)).usage.output_tokens)
    num_tokens = 0
    async for message in stub.StreamGenerate(request, timeout=_CALL_TIMEOUT_S):
        if message.HasField("usage"):
            num_tokens = message.usage.output_tokens
    return num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--callers", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--before", type=str.split, default=WITH_MODEL, help="another photon-grpc command")
    parser.add_argument("--after", type=str.split, default=WITH_MODEL, help="another photon-grpc command")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "tiny")
        replacing = replaced_under_load(model, args.callers, args.max_tokens, tuple(args.before), tuple(args.after))
        print(asyncio.run(replacing).told())


if __name__ == "__main__":
    main()
