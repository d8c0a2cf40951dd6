"""Measure what outputs in forms never seen before cost those who ask for them, their neighbours, and memory.

    python -m benchmarks.grammars [--shape demo|1b] [--only first beside many bombs] [--save NAME] [-- FLAGS OF serve]
    python -m benchmarks.grammars --target ADDR [--metrics ADDR] ...

`first`: one caller, in turn a request without a constraint, with a schema of 200 lines that was seen before, and with
one that is new: time to first token. `beside`: gaps between the messages of plain streams (client processes apart),
alone and while a hundred requests come beside them: plain ones, with the schema that was seen, with a new one each.
`many`: thousands of distinct small schemas, expressions, choices and grammars: what is resident in each process.
`bombs`: what is written to break a compiler: time to the answer, or to the refusal. Lag is that of the front ends'
event loops, by their own metric, meanwhile: a timer of every 50 ms, told as the upper bound of its bucket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import string
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import service, traffic, workloads
from benchmarks.memory import resident_mib
from benchmarks.saved import add_save_flag, saved
from photon_grpc.cli.load.load import Percentiles, Session, Turn, Workload, latencies_of, run_load, summarize
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc

NUM_LINES, NUM_BESIDE = 200, 100
PARTS = ("first", "beside", "many", "bombs")
#: The schema that was seen before.
_SEEN = 10**9
_CALLERS = 8
_TIMEOUT_S = 60.0
_LAG = "photon_event_loop_lag_seconds_bucket"
#: What the metric's page may be behind: front ends tell it twice a second.
_TOLD_S = 0.7

Constraint = inference_pb2.StructuredOutput


# --- what is asked for -----------------------------------------------------------------------------------------------


def schema(number: int, num_lines: int = NUM_LINES) -> str:
    """Of an object of objects; no two numbers share a name. So many lines at least, and a dozen more at most."""
    draw = random.Random(number)
    whole: dict[str, Any] = _object({})
    while (text := json.dumps(whole, indent=2)).count("\n") + 1 < num_lines:
        part = _object({_name(draw): _member(draw) for _ in range(draw.randint(1, 3))})
        name = _name(draw)
        whole["properties"][name] = part
        whole["required"].append(name)
    return text


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _member(draw: random.Random) -> dict[str, Any]:
    return draw.choice(
        (
            {"type": "string", "maxLength": draw.randint(5, 200)},
            {"type": "string", "format": draw.choice(("date", "date-time", "uuid", "email"))},
            {"type": "string", "pattern": f"^[A-Z]{{{draw.randint(2, 9)}}}-[0-9]{{4}}$"},
            {"type": "integer", "minimum": 0, "maximum": draw.randint(10, 10**6)},
            {"type": "number"},
            {"enum": [_name(draw) for _ in range(4)]},
            {"type": "array", "items": {"type": "string"}, "maxItems": draw.randint(2, 20)},
        )
    )


def _name(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=8))


def small(number: int) -> Constraint:
    """One of its own, of every kind in turn."""
    draw = random.Random(number)
    kind, name = number % 5, f"{_name(draw)}{number}"
    if kind == 0:
        return Constraint(json_schema=json.dumps(_object({name: _member(draw), _name(draw): _member(draw)})))
    if kind == 1:
        return Constraint(regex=f"{name}(-[0-9]{{{draw.randint(1, 9)}}}|/[a-z]+)*")
    if kind == 2:
        return Constraint(choices=Constraint.Choices(values=[name, *(_name(draw) for _ in range(9))]))
    if kind == 3:
        return _message(name, [_name(draw) for _ in range(3)])
    return Constraint(
        grammar=f'start: "{name}" item+\nitem: "[" WORD ("," WORD)* "]"\nWORD: /[a-z]{{1,{number % 17 + 1}}}/\n'
    )


def _message(name: str, fields: Sequence[str]) -> Constraint:
    """Of strings."""
    files = descriptor_pb2.FileDescriptorSet()
    message = files.file.add(name=f"{name}.proto", package="benchmark", syntax="proto3").message_type.add(name=name)
    for number, field in enumerate(fields, 1):
        message.field.add(name=field, number=number, type="TYPE_STRING", label="LABEL_OPTIONAL")
    wanted = Constraint.Protobuf(file_descriptor_set=files.SerializeToString(), message_type=f"benchmark.{name}")
    return Constraint(protobuf=wanted)


def bombs() -> dict[str, Constraint]:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)} | {"a20000": {}}
    kinds = [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(30_000))
    return {
        "20,000 references": Constraint(json_schema=json.dumps({"$ref": "#/$defs/a0", "$defs": chain})),
        "4¹² combinations": Constraint(json_schema=json.dumps({"type": "object", "allOf": kinds})),
        "nesting of 100,000": Constraint(json_schema='{"items":' * 100_000 + "{}" + "}" * 100_000),
        "20,000 properties": Constraint(
            json_schema=json.dumps({"properties": {f"property{i}": {"type": "string"} for i in range(20_000)}})
        ),
        "a multiple of 999,983": Constraint(json_schema='{"type": "integer", "multipleOf": 999983}'),
        "10⁹ repetitions": Constraint(regex="((a{1,1000}){1,1000}){1,1000}"),
        "200,000 groups": Constraint(regex="(" * 200_000 + "a" + ")" * 200_000),
        "30,000 rules": Constraint(grammar=f'start: r0\n{rules}r30000: "a"'),
        "60,000 alternatives": Constraint(grammar="start: " + " | ".join(f'"lit{i}"' for i in range(60_000))),
        "30,000 choices": Constraint(choices=Constraint.Choices(values=[f"choice {i}" for i in range(30_000)])),
        "20,000 alternatives in EBNF": Constraint(grammar="root ::= " + " | ".join(f'"w{i}"' for i in range(20_000))),
        "a literal of 900,000 in EBNF": Constraint(grammar=f'root ::= "{"a" * 900_000}"'),
        "a constant of 900,000": Constraint(json_schema=json.dumps({"const": "x" * 900_000})),
        "a message of 6,000 fields": _message("Bomb", [f"field{i}" for i in range(6_000)]),
        "every reading": Constraint(grammar='start: start start | "a"'),
    }


# --- asking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds to the first token (or to the failure), and why it failed."""

    first_s: float
    reason: str = ""


class Caller:
    """Asks one service, over one connection."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._numbers = itertools.count()

    async def ask(self, constraint: Constraint | None, max_tokens: int) -> Answer:
        request = inference_pb2.GenerateRequest(text=f"answer {next(self._numbers)}: ", structured_output=constraint)
        request.sampling.temperature = 0.0
        request.stop.max_tokens = max_tokens
        request.stop.ignore_eos = constraint is None
        request.cache.bypass_prefix_cache = True
        begun_s, first_s = time.perf_counter(), 0.0
        try:
            async for message in self._stub.StreamGenerate(request, timeout=_TIMEOUT_S):
                if message.deltas and not first_s:
                    first_s = time.perf_counter() - begun_s
        except grpc.aio.AioRpcError as error:
            return Answer(time.perf_counter() - begun_s, f"{error.code().name}: {error.details()}")
        return Answer(first_s)

    async def must(self, constraint: Constraint | None, max_tokens: int) -> float:
        """Seconds to the first token. Raises RuntimeError where none came."""
        answer = await self.ask(constraint, max_tokens)
        if answer.reason:
            raise RuntimeError(answer.reason)
        return answer.first_s


class Lag:
    """Of the event loops of all front ends, between two looks at their metric; none without its page."""

    def __init__(self, metrics: str) -> None:
        self._metrics = metrics
        self._before: dict[float, float] = {}

    async def begin(self) -> None:
        self._before = await self._read()

    async def told(self) -> str:
        """`1 / 5 / 10`: p50, p99 and worst, in ms at most."""
        await asyncio.sleep(_TOLD_S)
        after = await self._read()
        counts = {bound: count - self._before.get(bound, 0.0) for bound, count in after.items()}
        total = max(counts.values(), default=0.0)
        if not total:
            return "–"
        p50, p99, worst = (next(b for b, count in counts.items() if count >= total * q) for q in (0.5, 0.99, 1.0))
        return f"{p50 * 1e3:g} / {p99 * 1e3:g} / {worst * 1e3:g}"

    async def _read(self) -> dict[float, float]:
        """Upper bound in seconds -> how many were at most so late."""
        if not self._metrics:
            return {}
        page = await asyncio.to_thread(_page, self._metrics)
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return {float(sample.labels["le"]): sample.value for sample in samples if sample.name == _LAG}


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


# --- the parts -------------------------------------------------------------------------------------------------------


async def first(caller: Caller, lag: Lag, args: argparse.Namespace) -> None:
    seen = Constraint(json_schema=schema(_SEEN))
    await caller.must(None, 1)
    await caller.must(seen, 1)
    times: dict[str, list[float]] = {"plain": [], "schema seen before": [], "new schema": []}
    await lag.begin()
    for number in range(args.requests):
        asked = {"plain": None, "schema seen before": seen, "new schema": Constraint(json_schema=schema(number))}
        for name, constraint in asked.items():
            times[name].append(await caller.must(constraint, 1))
    print(f"\n## First token, one caller, {args.requests} of each in turn\n")
    print("| | TTFT p50 / p90 / p99 ms | beyond plain, p50 / p99 ms |\n|---|--:|--:|")
    plain = Percentiles.of(times["plain"])
    for name, each in times.items():
        mine = Percentiles.of(each)
        beyond = f"{(mine.p50 - plain.p50) * 1e3:.1f} / {(mine.p99 - plain.p99) * 1e3:.1f}" if mine != plain else "–"
        print(f"| {name} | {mine.p50 * 1e3:.1f} / {mine.p90 * 1e3:.1f} / {mine.p99 * 1e3:.1f} | {beyond} |")
    print(f"\nloop lag p50 / p99 / worst, at most ms: {await lag.told()}", flush=True)


class Neighbours:
    """Plain streams from processes of their own, for about so many seconds."""

    def __init__(self, target: str, args: argparse.Namespace) -> None:
        self._target, self._args = target, args
        self._vocab_size = service.vocab_size(target)
        self._runs = itertools.count(1)

    async def duration_s(self) -> float:
        """Of one turn of all, alone."""
        await self.speak(1, asyncio.Event())
        return summarize(await self._answers(1, lambda _: None)).duration_s

    async def speak(self, num_turns: int, begun: asyncio.Event) -> list[float]:
        """Gaps between messages, from the second turn on, when `begun` is set."""
        answers = await self._answers(num_turns, lambda _: begun.set())
        return latencies_of([answer for answer in answers if answer.turn]).gap_s

    async def _answers(self, num_turns: int, on_answer: Callable[[Any], None]) -> list[Any]:
        run = next(self._runs)
        sessions = [
            Session([Turn(workloads.prompt(run, slot * 64 + turn, 32), 128) for turn in range(num_turns)])
            for slot in range(self._args.streams)
        ]
        load = Workload(
            self._target,
            traffic.within(sessions, self._vocab_size),
            salt=f"grammars-{time.time_ns()}",
            timeout_s=_TIMEOUT_S,
        )
        answers = await run_load(load, self._args.clients, on_answer)
        for reason, failures in summarize(answers).failures.items():
            raise RuntimeError(f"{failures.count} streams failed with {reason}: {failures.message}")
        return answers


async def beside(caller: Caller, lag: Lag, neighbours: Neighbours, args: argparse.Namespace) -> None:
    seen = Constraint(json_schema=schema(_SEEN))
    await caller.must(seen, 1)
    num_turns = 1 + max(1, round(args.seconds / await neighbours.duration_s()))
    numbers = itertools.count(10**6)
    kinds: dict[str, Callable[[], Constraint | None] | None] = {
        "nobody": None,
        "plain requests": lambda: None,
        "one schema, seen before": lambda: seen,
        "new schemas": lambda: Constraint(json_schema=schema(next(numbers))),
    }
    gaps: dict[str, list[Percentiles]] = {name: [] for name in kinds}
    firsts: dict[str, list[float]] = {name: [] for name in kinds}
    lags: dict[str, list[str]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, make in kinds.items():
            await lag.begin()
            begun = asyncio.Event()
            speaking = asyncio.create_task(neighbours.speak(num_turns, begun))
            if make is not None:
                firsts[name] += await _spread(caller, make, begun, args.seconds)
            gaps[name].append(Percentiles.of(await speaking))
            lags[name].append(await lag.told())
    print(
        f"\n## Gaps of {args.streams} plain streams while {NUM_BESIDE} requests of 8 tokens come beside them within "
        f"{args.seconds:g} s; medians of {args.rounds} runs in turn\n"
    )
    print("| beside them | gap p50 / p90 / p99 ms | their TTFT p50 / p99 ms | lag p50 / p99 / worst, at most ms |")
    print("|---|--:|--:|--:|")
    for name, runs in gaps.items():
        p50, p90, p99 = (statistics.median(getattr(run, q) for run in runs) * 1e3 for q in ("p50", "p90", "p99"))
        theirs = Percentiles.of(firsts[name])
        told = f"{theirs.p50 * 1e3:.1f} / {theirs.p99 * 1e3:.1f}" if firsts[name] else "–"
        print(f"| {name} | {p50:.2f} / {p90:.2f} / {p99:.2f} | {told} | {'; '.join(lags[name])} |", flush=True)


async def _spread(
    caller: Caller, make: Callable[[], Constraint | None], begun: asyncio.Event, seconds: float
) -> list[float]:
    await begun.wait()
    # Made before: it takes this process longer than asking.
    asked = [make() for _ in range(NUM_BESIDE)]
    calls = []
    for constraint in asked:
        calls.append(asyncio.create_task(caller.must(constraint, 8)))
        await asyncio.sleep(0.9 * seconds / NUM_BESIDE)
    return await asyncio.gather(*calls)


async def many(caller: Caller, lag: Lag, target: str, args: argparse.Namespace) -> None:
    pids = service.processes(target)
    numbers, begun_s = iter(range(1, args.count + 1)), time.monotonic()

    def row(number: int) -> None:
        sizes = (f"{resident_mib(pid):.1f}" for pid in pids.values())
        print(f"| {number:,} | {time.monotonic() - begun_s:.0f} | {' | '.join(sizes)} |", flush=True)

    async def call() -> None:
        for number in numbers:
            await caller.must(small(number), 4)
            if number % args.every == 0:
                row(number)

    print(f"\n## {args.count:,} distinct grammars, {_CALLERS} at a time: MiB resident\n")
    print(f"| grammars | s | {' | '.join(pids)} |\n|--:|--:|{'--:|' * len(pids)}")
    await lag.begin()
    row(0)
    await asyncio.gather(*(call() for _ in range(_CALLERS)))
    print(f"\nloop lag p50 / p99 / worst, at most ms: {await lag.told()}", flush=True)


async def explode(caller: Caller, lag: Lag, args: argparse.Namespace) -> None:
    print(f"\n## Bombs, {args.rounds} times each\n\n| | KB | ms, median / worst | answered with |\n|---|--:|--:|---|")
    await lag.begin()
    for name, bomb in bombs().items():
        answers = [await caller.ask(bomb, 16) for _ in range(args.rounds)]
        times = sorted(answer.first_s for answer in answers)
        told = (answers[0].reason or "tokens").replace("|", "\\|")
        told = told if len(told) <= 120 else f"{told[:120]} …"
        print(
            f"| {name} | {bomb.ByteSize() / 1e3:,.1f} | {statistics.median(times) * 1e3:.0f} / {times[-1] * 1e3:.0f} "
            f"| {told} |",
            flush=True,
        )
    print(f"\nloop lag p50 / p99 / worst, at most ms: {await lag.told()}", flush=True)


async def measure(target: str, metrics: str, args: argparse.Namespace) -> None:
    lag = Lag(metrics)
    async with _caller(target) as caller:
        if "first" in args.only:
            await first(caller, lag, args)
        if "beside" in args.only:
            await beside(caller, lag, Neighbours(target, args), args)
        if "many" in args.only:
            await many(caller, lag, target, args)
        if "bombs" in args.only:
            await explode(caller, lag, args)


@contextlib.asynccontextmanager
async def _caller(target: str) -> AsyncIterator[Caller]:
    options = [("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(target, options) as channel:
        yield Caller(channel)


@contextlib.contextmanager
def _served(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Addresses of the service and of its metrics."""
    if args.target:
        yield args.target, args.metrics
        return
    metrics = service.free_address()
    with (
        service.model_flags(args.shape) as flags,
        service.serving(*flags, "--metrics-listen", metrics, *args.flags) as target,
    ):
        yield target, metrics


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*workloads.SHAPES, "demo"], default="demo")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--requests", type=int, default=100, help="of each kind, of first")
    parser.add_argument("--streams", type=int, default=4, help="of beside")
    parser.add_argument("--clients", type=int, default=1, help="processes of these streams")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run of beside")
    parser.add_argument("--rounds", type=int, default=3, help="of beside and bombs")
    parser.add_argument("--count", type=int, default=10_000, help="of many")
    parser.add_argument("--every", type=int, default=1_000, help="grammars a row, of many")
    parser.add_argument("--target", metavar="ADDR", help="a service that already runs")
    parser.add_argument("--metrics", metavar="ADDR", default="", help="its --metrics-listen")
    parser.add_argument("flags", nargs="*", help="flags of serve, after --")
    add_save_flag(parser)
    return parser.parse_args(argv)


def main() -> int:
    args = arguments()
    with saved(args.save), _served(args) as (target, metrics):
        print(f"{args.target or args.shape}; flags: {' '.join(args.flags) or 'none'}", flush=True)
        asyncio.run(measure(target, metrics, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
