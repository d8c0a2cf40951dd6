"""`bench`: the requests of a load, which `load.py` sends to a running server, and the report about them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from photon_grpc.cli.load.load import RequestResult, Session, Summary, Turn, Workload, latencies_of, run_load, summarize
from photon_grpc.cli.load.report import check_plot, report, write_plot
from photon_grpc.cli.terminal.connection import connection
from photon_grpc.client import Client, Model
from photon_grpc.errors import ConfigError, FeatureNotSupported, PromptTooLong

DEFAULT_CONCURRENCY = 16
#: Requests by default: 4 for each concurrent one of a closed loop, or those of 10 seconds of an open loop.
_REQUESTS_PER_PLACE = 4
_OPEN_LOOP_S = 10.0
#: Load that one client process carries without being the bottleneck: streams, and tokens/s in messages of one token.
_STREAMS_PER_PROCESS = 32
_TOKENS_PER_S_PER_PROCESS = 10_000


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The flags of `bench`; its properties replace None and 0."""

    target: str
    model: str = ""
    concurrency: int | None = None
    requests: int | None = None
    input_tokens: int = 128
    output_tokens: int = 128
    #: Requests per second, with exponentially distributed intervals; None: a closed loop.
    rate: float | None = None
    prompt_file: Path | None = None
    text: bool = True
    logprobs: int | None = None
    seed: int = 0
    processes: int | None = None
    #: The requests of a client process share one stream.
    multiplex: bool = False
    #: Most tokens that a step may draft for an answer; None: as many as pay.
    speculation: int | None = None
    #: File for a plot of the latencies.
    plot: Path | None = None

    @property
    def places(self) -> int | None:
        """Requests at a time; None: all that arrive."""
        return self.concurrency or (None if self.rate else DEFAULT_CONCURRENCY)

    @property
    def num_requests(self) -> int:
        if self.requests:
            return self.requests
        return ceil(self.rate * _OPEN_LOOP_S) if self.rate else _REQUESTS_PER_PLACE * (self.places or 1)

    @property
    def num_processes(self) -> int:
        if self.processes:
            return self.processes
        by_streams = (self.places or 0) / _STREAMS_PER_PROCESS
        by_tokens = (self.rate or 0.0) * self.output_tokens / _TOKENS_PER_S_PER_PROCESS
        return max(1, min(8, os.cpu_count() or 1, ceil(max(by_streams, by_tokens))))


def bench(options: BenchOptions, *, as_json: bool = False) -> int:
    """Run the load and print a report or a JSON object; return 0, or 1 if no request was completed.

    Ctrl-C ends the load; the report is then about the requests that have ended. Raise PhotonError if no server
    answers, and ConfigError if the file of prompts cannot be read.
    """
    return asyncio.run(_bench(options, as_json=as_json))


async def _bench(options: BenchOptions, *, as_json: bool) -> int:
    if options.plot:
        check_plot(options.plot)
    async with Client(options.target, **connection()) as client:
        model = await client.model(options.model)
    sessions = plan(options, model)
    load = Workload(
        target=options.target,
        sessions=sessions,
        concurrency=options.places,
        model=options.model,
        # Prevents cache hits on the prompts of earlier runs.
        salt=f"bench-{time.time_ns()}",
        text=options.text,
        logprobs=options.logprobs,
        multiplex=options.multiplex,
        speculation=options.speculation,
    )
    answers: list[RequestResult] = []
    try:
        with _progress(len(sessions)) as advance:

            def collect(answer: RequestResult) -> None:
                answers.append(answer)
                advance(answer)

            await run_load(load, options.num_processes, collect)
    except asyncio.CancelledError:
        print(f"photon-grpc: interrupted after {len(answers)} of {len(sessions)} requests", file=sys.stderr)
        if answers:
            _publish(options, model, answers, as_json=as_json)
        raise
    return 0 if _publish(options, model, answers, as_json=as_json).completed else 1


def _publish(options: BenchOptions, model: Model, answers: Sequence[RequestResult], *, as_json: bool) -> Summary:
    """Print the report or the JSON object, draw the plot if there is to be one, and return the figures."""
    summary, latencies = summarize(answers), latencies_of(answers)
    if as_json:
        print(json.dumps({"options": _plain(options), "model": model.name, **asdict(summary)}))
    else:
        report(_title(options, model), summary, latencies)
    if options.plot:
        write_plot(options.plot, _title(options, model), latencies)
    return summary


def plan(options: BenchOptions, model: Model) -> list[Session]:
    """Return one session for each request; in an open loop each has its start time.

    Raise PromptTooLong if the lengths exceed the context, and FeatureNotSupported if the server does not report its
    vocabulary.
    """
    rng = random.Random(options.seed)
    prompts = _prompts_of(options.prompt_file) if options.prompt_file else _random_prompts(options, model, rng)
    start_s = 0.0
    sessions = []
    for index in range(options.num_requests):
        start_s += rng.expovariate(options.rate) if options.rate else 0.0
        sessions.append(Session([Turn(prompts[index % len(prompts)], options.output_tokens)], start_s))
    return sessions


def _random_prompts(options: BenchOptions, model: Model, rng: random.Random) -> list[list[int]]:
    """Return a different prompt of random ids for every request."""
    if not model.vocab_size:
        raise FeatureNotSupported(
            f"{model.name} does not report the size of its vocabulary; give texts with --prompt-file",
            field="vocab_size",
        )
    needed, limit = options.input_tokens + options.output_tokens, model.max_context_tokens
    if limit and needed > limit:
        problem = f"--input-tokens plus --output-tokens is {needed}, which exceeds the context of {limit} tokens"
        raise PromptTooLong(f"{problem} of {model.name}", needed=needed, limit=limit)
    return [[rng.randrange(model.vocab_size) for _ in range(options.input_tokens)] for _ in range(options.num_requests)]


def _prompts_of(path: Path) -> list[str | list[int]]:
    """Return the prompt of every line.

    A line of a `.jsonl` file is a JSON string, a list of ids, or an object with either as its "prompt".
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        prompts = [_prompt_of(json.loads(line)) for line in lines] if path.suffix == ".jsonl" else lines
    except OSError as error:
        raise ConfigError(f"--prompt-file: {path}: {error.strerror}", field="--prompt-file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--prompt-file: {path}: {error}", field="--prompt-file") from error
    if not prompts:
        raise ConfigError(f"--prompt-file: {path} has no prompts", field="--prompt-file")
    return list(prompts)


def _prompt_of(value: Any) -> str | list[int]:
    """Return the prompt in one JSON value. Raise ValueError."""
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**32 for token in prompt):
        return prompt
    raise ValueError('a line must be a text, a list of ids, or an object with either as its "prompt"')


@contextmanager
def _progress(total: int) -> Iterator[Callable[[RequestResult], None]]:
    """Show a bar of requests with rate and failures if stderr is a terminal; yield what advances it."""
    if not sys.stderr.isatty():
        yield lambda answer: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[so_far]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total, so_far="")
        begun_s, tokens, failed = time.monotonic(), 0, 0

        def advance(answer: RequestResult) -> None:
            nonlocal tokens, failed
            tokens += answer.output_tokens
            failed += bool(answer.reason)
            rate = tokens / max(time.monotonic() - begun_s, 1e-9)
            bar.update(task, advance=1, so_far=f"{rate:,.0f} tokens/s" + (f", {failed} failed" if failed else ""))

        yield advance


def _title(options: BenchOptions, model: Model) -> str:
    prompts = f"prompts of {options.prompt_file}" if options.prompt_file else f"{options.input_tokens} ids in"
    arrivals = f", {options.rate:g} per second" if options.rate else ""
    places = f", {options.places} at a time" if options.places else ""
    scores = "" if options.logprobs is None else f" with logprobs {options.logprobs}"
    drafts = "" if options.speculation is None else f", at most {options.speculation} drafts a step"
    streams = ", one stream each" if options.multiplex else ""
    parts = [
        f"{model.name} at {options.target}",
        f"{options.num_requests} requests{arrivals}{places}",
        f"{prompts}, {options.output_tokens} tokens out{scores}{drafts}",
        f"{options.num_processes} client process{'' if options.num_processes == 1 else 'es'}{streams}",
    ]
    return " · ".join(parts)


def _plain(options: BenchOptions) -> dict[str, Any]:
    path = options.prompt_file
    return asdict(options) | {
        "prompt_file": str(path) if path else None,
        "plot": str(options.plot) if options.plot else None,
        "concurrency": options.places,
        "requests": options.num_requests,
        "processes": options.num_processes,
    }
