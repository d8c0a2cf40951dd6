"""Generations on a terminal, through the gRPC client: text on stdout, everything else on stderr."""

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
    """A stream's speed: the first token by the client's clock, the rate by the server's.

    A message may carry several tokens, so the times between messages do not show the rate.
    """

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._first_s: float | None = None

    def message(self) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic() - self._started_s

    def summary(self, usage: Usage | None, timing: Timing | None, reason: str) -> str:
        """Return a line such as `37 tokens · first after 12 ms · 240 tokens/s · MAX_TOKENS`.

        The rate counts the tokens after the first.
        """
        num_tokens = usage.output_tokens if usage else 0
        parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
        if self._first_s is not None:
            parts.append(f"first after {_duration(self._first_s)}")
        if timing and num_tokens > 1 and timing.total_s > timing.first_token_s:
            parts.append(f"{(num_tokens - 1) / (timing.total_s - timing.first_token_s):,.0f} tokens/s")
        return " · ".join([*parts, *([reason] if reason else [])])


async def generate(target: str, prompt: Prompt, options: Options, *, as_json: bool = False) -> None:
    """Stream one generation to stdout and write a line about it to stderr. Raise PhotonError."""
    async with Client(target, **connection()) as client, client.stream(prompt, **options) as stream:
        if as_json:
            await _write_json(stream)
        else:
            summary = await write_text(stream, sys.stdout)
            print(summary, file=sys.stderr)


async def write_text(stream: Stream, out: TextIO) -> str:
    """Write the text of a stream as it comes, and a line end; return the summary. Several outputs are numbered."""
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
    """Text for a terminal: the first output as it comes, the others one after another at the end."""

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


class ReasoningText:
    """Reasoning for a terminal, dimmed, without white space around it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._style = ("\x1b[2m", "\x1b[0m") if out.isatty() else ("", "")
        #: White space that is shown only if more reasoning comes.
        self._blank = ""
        self._is_open = self._has_content = False

    def add(self, delta: Delta) -> Delta:
        """Show the reasoning of the delta; return the delta with its content as its text."""
        self._think(delta.reasoning)
        content = delta.content if self._has_content else delta.content.lstrip()
        if content:
            self._has_content = True
            self.end()
        return replace(delta, text=content)

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._write("\n")

    def _think(self, reasoning: str) -> None:
        text = self._blank + reasoning if self._is_open else reasoning.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._is_open = True
            self._write(f"{self._style[0]}{printable(shown) if self._out.isatty() else shown}{self._style[1]}")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


async def _write_json(stream: Stream) -> None:
    """Write one JSON object a line: the deltas, then the start, usage and timing. Bytes are base64."""
    async for delta in stream:
        _print_json(_without_empty(asdict(delta)))
    whole = {"start": stream.start, "usage": stream.usage, "timing": stream.timing}
    _print_json({name: asdict(part) for name, part in whole.items() if part is not None})


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, default=to_base64), flush=True)


def to_base64(value: Any) -> str:
    """Encode bytes, or a protobuf message."""
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
