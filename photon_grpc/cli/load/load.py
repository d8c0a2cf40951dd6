"""A load on a server from separate client processes: sessions of requests in, their results and times out.

In a closed loop a fixed number of sessions runs at a time; in an open loop sessions start at planned times; a
conversation is a session that keeps its history. `RequestResult` and `Summary` define the figures. This module imports
neither torch nor rich.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from photon_grpc.errors import InternalFailure

#: The longest line of a client process: one answer with the times of all its messages.
_MAX_LINE_BYTES = 1 << 26
#: Time for a client process to end after its last line.
_EXIT_TIMEOUT_S = 5.0
#: Time between the command to start and the start, so that every process has received it.
_START_DELAY_S = 0.1
GRPC_CLIENT = "photon_grpc.cli.load.load_client"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: text or ids in, exactly `output_tokens` out (EOS is ignored)."""

    prompt: str | Sequence[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Requests one after another, the first `start_s` after the start.

    With `keeps_history` (ids only) every prompt begins with all earlier prompts and answers; a failure ends the
    session.
    """

    turns: Sequence[Turn]
    start_s: float = 0.0
    keeps_history: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions, in the order of their starts, and the options of their requests.

    `concurrency` is the number of sessions that run at a time, None for all that have started. `salt` prevents cache
    hits on the prefixes of another run.
    """

    target: str
    sessions: Sequence[Session]
    concurrency: int | None = None
    model: str = ""
    salt: str = ""
    #: Request text; False: ids.
    text: bool = True
    #: Number of alternatives for which log-probabilities are requested.
    logprobs: int | None = None
    bypass_prefix_cache: bool = False
    timeout_s: float | None = None
    #: The requests of a process share one stream.
    multiplex: bool = False
    #: Most tokens that a step may draft for an answer; None: as many as pay.
    speculation: int | None = None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request's result, in seconds since the start of the load or of the request.

    A failed one has a `reason` (of `photon_grpc.errors`) and a `message`, and the times of messages before the failure.
    """

    session: int
    turn: int
    sent_s: float
    #: Delay caused by slow client processes; 0 for requests that wait for others.
    late_s: float
    #: From sending to the first message with a token, between messages, from sending to the end.
    first_s: float | None
    gaps_s: list[float]
    total_s: float
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    reason: str = ""
    message: str = ""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0

    @property
    def per_token_s(self) -> float | None:
        """The time from the first message to the last, divided by the number of tokens after the first."""
        return sum(self.gaps_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The elements at ⌊n·q⌋ of a sorted list of n values."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values)
        return cls(*(ordered[int(len(ordered) * q)] for q in (0.5, 0.9, 0.99))) if ordered else cls()


@dataclass(frozen=True, slots=True)
class Failures:
    """The number of requests that failed for one reason, and the message of the first."""

    count: int
    message: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a load, over completed requests; rates are over the time from the first send to the last end."""

    completed: int
    failures: dict[str, Failures]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    output_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    tokens_per_message: float
    ttft_s: Percentiles = field(default_factory=Percentiles)
    #: Time per output token after the first.
    tpot_s: Percentiles = field(default_factory=Percentiles)
    #: Time between messages, each of which carries all tokens since the last.
    gap_s: Percentiles = field(default_factory=Percentiles)
    total_s: Percentiles = field(default_factory=Percentiles)
    late_s: Percentiles = field(default_factory=Percentiles)

    @property
    def failed(self) -> int:
        return sum(failures.count for failures in self.failures.values())


@dataclass(frozen=True, slots=True)
class Latencies:
    """All latencies of completed requests in seconds, named as in Summary."""

    ttft_s: list[float]
    tpot_s: list[float]
    gap_s: list[float]
    total_s: list[float]


def latencies_of(answers: Sequence[RequestResult]) -> Latencies:
    done = [answer for answer in answers if not answer.reason]
    return Latencies(
        ttft_s=[answer.first_s for answer in done if answer.first_s is not None],
        tpot_s=[answer.per_token_s for answer in done if answer.per_token_s is not None],
        gap_s=[gap for answer in done for gap in answer.gaps_s],
        total_s=[answer.total_s for answer in done],
    )


def summarize(answers: Sequence[RequestResult]) -> Summary:
    done = [answer for answer in answers if not answer.reason]
    duration_s = _duration_s(answers)
    latencies = latencies_of(answers)
    num_messages = sum(1 + len(answer.gaps_s) for answer in done)
    output_tokens = sum(answer.output_tokens for answer in done)
    prompt_tokens = sum(answer.prompt_tokens for answer in done)

    def rate(amount: int) -> float:
        return amount / duration_s if duration_s else 0.0

    return Summary(
        completed=len(done),
        failures=_failures(answers),
        duration_s=duration_s,
        requests_per_s=rate(len(done)),
        output_tokens_per_s=rate(output_tokens),
        prompt_tokens_per_s=rate(prompt_tokens),
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=sum(answer.cached_prompt_tokens for answer in done),
        draft_tokens=sum(answer.draft_tokens for answer in done),
        accepted_draft_tokens=sum(answer.accepted_draft_tokens for answer in done),
        tokens_per_message=output_tokens / num_messages if num_messages else 0.0,
        ttft_s=Percentiles.of(latencies.ttft_s),
        tpot_s=Percentiles.of(latencies.tpot_s),
        gap_s=Percentiles.of(latencies.gap_s),
        total_s=Percentiles.of(latencies.total_s),
        late_s=Percentiles.of([answer.late_s for answer in answers]),
    )


def _duration_s(answers: Sequence[RequestResult]) -> float:
    if not answers:
        return 0.0
    return max(answer.sent_s + answer.total_s for answer in answers) - min(answer.sent_s for answer in answers)


def _failures(answers: Sequence[RequestResult]) -> dict[str, Failures]:
    by_reason: dict[str, list[str]] = {}
    for answer in answers:
        if answer.reason:
            by_reason.setdefault(answer.reason, []).append(answer.message)
    return {reason: Failures(len(messages), messages[0]) for reason, messages in by_reason.items()}


async def run_load(
    load: Workload,
    num_processes: int = 1,
    on_answer: Callable[[RequestResult], None] | None = None,
    client_module: str = GRPC_CLIENT,
) -> list[RequestResult]:
    """Run the load; return all answers in the order in which they ended. `on_answer` gets each as it comes.

    `client_module` is the module that each client process runs.

    The sessions are distributed over the processes in turn. Each process has one connection; all start together once
    all are connected. Raise InternalFailure if a process fails.
    """
    num_processes = max(1, min(num_processes, len(load.sessions), load.concurrency or len(load.sessions)))
    answers: list[RequestResult] = []

    def collect(answer: RequestResult) -> None:
        answers.append(answer)
        if on_answer is not None:
            on_answer(answer)

    clients: list[_ClientProcess] = []
    try:
        for index in range(num_processes):
            # Not a comprehension: if one fails to start, those before it must be ended.
            clients.append(await _ClientProcess.start(client_module, index, num_processes))  # noqa: PERF401
        await _all_of(client.prepare(_share(load, client.index, num_processes)) for client in clients)
        start_at_s = time.time() + _START_DELAY_S
        await _all_of(client.play(start_at_s, collect) for client in clients)
    finally:
        await asyncio.gather(*(client.end() for client in clients))
    return answers


async def _all_of(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _share(load: Workload, index: int, num_processes: int) -> Workload:
    concurrency = load.concurrency
    if concurrency is not None:
        concurrency = concurrency // num_processes + (index < concurrency % num_processes)
    others = {item.name: getattr(load, item.name) for item in fields(Workload)}
    return Workload(**others | {"sessions": load.sessions[index::num_processes], "concurrency": concurrency})


class _ClientProcess:
    """One child process, which receives its requests and a start time and writes a line per answer."""

    def __init__(self, index: int, stride: int, process: asyncio.subprocess.Process) -> None:
        self.index = index
        self._stride = stride
        self._process = process
        self._is_done = False

    @classmethod
    async def start(cls, module: str, index: int, stride: int) -> _ClientProcess:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            # A Ctrl-C must reach this process only, which then ends the child.
            start_new_session=True,
        )
        return cls(index, stride, process)

    async def prepare(self, load: Workload) -> None:
        """Send the load, and wait until the process is connected."""
        await self._send(json.dumps(load, default=as_json))
        await self._receive()

    async def play(self, start_at_s: float, collect: Callable[[RequestResult], None]) -> None:
        await self._send(json.dumps(start_at_s))
        while line := await self._receive():
            answer = RequestResult(**json.loads(line))
            # Each process numbers its sessions from 0.
            others = {item.name: getattr(answer, item.name) for item in fields(RequestResult)}
            collect(RequestResult(**others | {"session": self.index + answer.session * self._stride}))

    async def end(self) -> None:
        if self._is_done:
            # It ends by itself; killing it first would replace its exit code.
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_TIMEOUT_S):
                    await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()

    async def _receive(self) -> bytes:
        """Return the next line; b"" at the end."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).strip()
        if not line:
            raise InternalFailure(f"client process {self.index} ended with exit code {await self._process.wait()}")
        self._is_done = line == b"done"
        return b"" if self._is_done else line


def as_json(value: Any) -> Any:
    """Return a dataclass as a value that JSON can hold."""
    return {item.name: getattr(value, item.name) for item in fields(value)}
