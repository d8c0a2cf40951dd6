"""Generations and chats on a terminal, through the gRPC client. Text goes to stdout, everything about it to stderr."""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TextIO

from photon_grpc.cli.api_key import key_metadata
from photon_grpc.cli.score_lines import Scores
from photon_grpc.client import Client, Delta, Options, Prompt, Stream, SyncClient, Timing, Usage
from photon_grpc.errors import PhotonError

_CHAT_HELP = (
    "/reset forgets the conversation · /system TEXT sets the instructions · /quit or Ctrl-D leaves · "
    "Ctrl-C stops an answer"
)


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
    async with Client(target, metadata=key_metadata()) as client, client.stream(prompt, **options) as stream:
        if as_json:
            await _write_json(stream)
        else:
            summary = await write_text(stream, sys.stdout)
            print(summary, file=sys.stderr)


async def write_text(stream: Stream, out: TextIO) -> str:
    """The texts of a stream as they come, a line end after them; return the summary. Several outputs are told apart by
    their number."""
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
    print(json.dumps(value, ensure_ascii=False, default=_base64), flush=True)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {name: part for name, part in value.items() if name == "text" or part not in (None, (), "")}
    return {name: _without_empty(part) for name, part in kept.items()}


class Chat:
    """A conversation: what was said, and the commands that begin with a slash."""

    def __init__(self, client: SyncClient, options: Options, system: str = "", *, has_reasoning: bool = False) -> None:
        """`has_reasoning`: the model's reasoning is shown, but is no part of the conversation."""
        self._client = client
        self._options = options
        self._has_reasoning = has_reasoning
        self.system = system
        self.history: list[dict[str, str]] = []

    def run(self, lines: Iterable[str]) -> None:
        """Answer line after line until there is none, or /quit. Ctrl-C stops the answer at hand."""
        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text.startswith("/"):
                self._obey(text)
            elif text:
                self._answer(text)

    def _obey(self, command: str) -> None:
        verb, _, rest = command.partition(" ")
        if verb == "/reset":
            self.history.clear()
            _remark("the conversation is forgotten")
        elif verb == "/system":
            self.system = rest.strip()
            _remark("the instructions are " + (repr(self.system) if self.system else "none"))
        else:
            _remark(_CHAT_HELP)

    def _answer(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})
        answered: list[str] = []
        try:
            self._stream(answered)
        except KeyboardInterrupt:
            _remark("stopped")
        except PhotonError as error:
            _remark(f"{error.reason}: {error}" + (" (/reset makes room)" if error.reason == "PROMPT_TOO_LONG" else ""))
        if answered:
            self.history.append({"role": "assistant", "content": "".join(answered)})
        else:
            self.history.pop()

    def _stream(self, answered: list[str]) -> None:
        stopwatch, written, scores, reason = Stopwatch(), Written(sys.stdout), Scores(), ""
        thoughts = Thoughts(sys.stderr)
        with self._client.stream(self._messages(), **self._options) as stream:
            try:
                for delta in stream:
                    stopwatch.message()
                    spoken = thoughts.add(delta) if self._has_reasoning else delta
                    written.add(spoken)
                    scores.add(delta)
                    answered.append(spoken.text)
                    reason = delta.finish.reason if delta.finish else reason
            finally:
                thoughts.end()
                written.end()
        scores.print(stream.start, sys.stderr)
        _remark(stopwatch.summary(stream.usage, stream.timing, reason))

    def _messages(self) -> list[dict[str, str]]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.history]


def chat(target: str, options: Options, system: str = "") -> None:
    """Converse with the user at the terminal, or with the lines of stdin. Raise PhotonError where no server answers."""
    with SyncClient(target, metadata=key_metadata()) as client:
        model = client.model(options.get("model", ""))
        _remark(f"{model.name} at {target} · {_CHAT_HELP}")
        # Each turn begins with all turns before it: the server is to keep them.
        session: Options = {"session_id": uuid.uuid4().hex, **options}
        has_reasoning = "REASONING" in model.features
        lines = _typed_lines() if sys.stdin.isatty() else sys.stdin
        Chat(client, session, system, has_reasoning=has_reasoning).run(lines)


def _typed_lines() -> Iterator[str]:
    """With history and editing where readline is; Ctrl-C empties the line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")
    while True:
        try:
            yield input("› ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def printable(text: str) -> str:
    """Show control characters instead of sending them: a model's text must not steer the terminal."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else _shown(character) for character in text
    )


def _shown(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else " " if character.isspace() else "\ufffd"


def _remark(text: str) -> None:
    style = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{style[0]}{text}{style[1]}", file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
