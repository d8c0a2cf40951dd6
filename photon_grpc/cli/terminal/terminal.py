"""Generations on a terminal, through the gRPC client. Text goes to stdout, everything about it to stderr."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, TextIO

from photon_grpc.cli.terminal.connection import connection
from photon_grpc.cli.terminal.logprob_lines import Scores
from photon_grpc.cli.terminal.printable import printable
from photon_grpc.client import Client, Delta, Options, Prompt, Stream, Timing, Usage


class Stopwatch:
    """A stream's speed: the first token by this side's clock, the rate by the server's.

    Messages gather tokens, so their distances on this side say little.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._first_s: float | None = None

    def message(self) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic() - self._started_s

    def summary(self, usage: Usage | None, timing: Timing | None, reason: str) -> str:
        """`37 tokens · first after 12 ms · 240 tokens/s · MAX_TOKENS`; the rate is that of the tokens after the
        first."""
        num_tokens = usage.output_tokens if usage else 0
        parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
        if self._first_s is not None:
            parts.append(f"first after {_duration(self._first_s)}")
        if timing and num_tokens > 1 and timing.total_s > timing.first_token_s:
            parts.append(f"{(num_tokens - 1) / (timing.total_s - timing.first_token_s):,.0f} tokens/s")
        return " · ".join([*parts, *([reason] if reason else [])])


async def generate(target: str, prompt: Prompt, options: Options, *, as_json: bool = False) -> None:
    """Streams one generation to stdout and a line about it to stderr. Raise PhotonError."""
    async with Client(target, **connection()) as client, client.stream(prompt, **options) as stream:
        if as_json:
            await _write_json(stream)
        else:
            summary = await write_text(stream, sys.stdout)
            print(summary, file=sys.stderr)


async def write_text(stream: Stream, out: TextIO) -> str:
    """Return the texts of a stream as they come, a line end after them; return the summary. Several outputs are told
    apart by their number."""
    stopwatch, reasons, written, scores = Stopwatch(), {}, Written(out), Scores()
    try:
        async for delta in stream:
            stopwatch.message()
            written.add(delta)
            scores.add(delta)
            if delta.finish:
                reasons[delta.index] = delta.finish.reason
    finally:
        written.end()
    scores.print(stream.start, sys.stderr)
    return stopwatch.summary(stream.usage, stream.timing, ", ".join(dict.fromkeys(reasons.values())))


class Written:
    """Text on its way to a terminal: one output flows, several are gathered and shown one after the other."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._later: dict[int, list[str]] = {}
        self._last = "\n"

    def add(self, delta: Delta) -> None:
        if delta.index:
            self._later.setdefault(delta.index, []).append(delta.text)
        elif delta.text:
            self._write(delta.text)

    def end(self) -> None:
        for index, texts in sorted(self._later.items()):
            self._end_line()
            self._write(f"── output {index} ──\n{''.join(texts)}")
        self._end_line()

    def _write(self, text: str) -> None:
        self._out.write(printable(text) if self._out.isatty() else text)
        self._out.flush()
        self._last = text[-1]

    def _end_line(self) -> None:
        if self._last != "\n":
            self._write("\n")


class Thoughts:
    """Reasoning on its way to a terminal, dimmed; white space around it is left out."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._style = ("\x1b[2m", "\x1b[0m") if out.isatty() else ("", "")
        #: White space that is shown before more reasoning only.
        self._blank = ""
        self._is_open = self._is_spoken = False

    def add(self, delta: Delta) -> Delta:
        """Show its reasoning; return it with the content as its text."""
        self._think(delta.reasoning)
        content = delta.content if self._is_spoken else delta.content.lstrip()
        if content:
            self._is_spoken = True
            self.end()
        return replace(delta, text=content)

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._write("\n")

    def _think(self, reasoning: str) -> None:
        text = self._blank + reasoning if self._is_open else reasoning.lstrip()
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            self._is_open = True
            self._write(f"{self._style[0]}{printable(said) if self._out.isatty() else said}{self._style[1]}")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


async def _write_json(stream: Stream) -> None:
    """One JSON object a line: a delta each, then the start, usage and timing of the whole. Bytes are base64."""
    async for delta in stream:
        _print_json(_without_empty(asdict(delta)))
    whole = {"start": stream.start, "usage": stream.usage, "timing": stream.timing}
    _print_json({name: asdict(part) for name, part in whole.items() if part is not None})


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, default=to_base64), flush=True)


def to_base64(value: Any) -> str:
    """Of bytes, or of a message of protobuf."""
    return base64.b64encode(value if isinstance(value, bytes) else value.SerializeToString()).decode()


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {name: part for name, part in value.items() if name == "text" or part not in (None, (), "")}
    return {name: _without_empty(part) for name, part in kept.items()}


def remark(text: str) -> None:
    style = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{style[0]}{text}{style[1]}", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
