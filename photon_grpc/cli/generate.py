"""`generate`, `chat` and `batch`: the verbs that ask a running server for text. What they do is in `terminal.py`,
`conversation.py` and `batch.py`, imported when they are called."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from photon_grpc.cli.connection import check_target, with_tls
from photon_grpc.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class _TextFile(click.ParamType[str]):
    """A file's text; '-' is stdin."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        try:
            with click.open_file(value, encoding="utf-8") as file:
                return str(file.read())
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{value}: {error}", parameter, context)


_TEXT_FILE = _TextFile()

_target = click.option(
    "--target",
    envvar="PHOTON_TARGET",
    default="127.0.0.1:50051",
    show_default=True,
    metavar="ADDR",
    help="Server: HOST:PORT or unix:PATH.",
    callback=lambda _context, _option, target: check_target(target),
)


def with_target(function: F) -> F:
    """Add the options of a server's address and of its connection."""
    return _target(with_tls(function))


def with_generation(function: F) -> F:
    """Flags that `generate` and `chat` share; unset ones are left to the model's defaults."""
    options = (
        with_target,
        click.option("--model", metavar="NAME", help="A model that it serves; unset: its default."),
        click.option(
            "--max-tokens",
            type=click.IntRange(1),
            metavar="N",
            help="Tokens to produce at most; unset: what the context holds.",
        ),
        click.option("--temperature", type=click.FloatRange(0), metavar="X", help="0 is greedy."),
        click.option(
            "--top-p", type=float, metavar="X", help="Draw from the likeliest tokens with this share of probability."
        ),
        click.option(
            "--top-k", type=int, metavar="N", help="Draw from this many of the likeliest tokens; -1: from all."
        ),
        click.option(
            "--min-p",
            type=click.FloatRange(0, 1),
            metavar="X",
            help="Draw from tokens at least this likely relative to the likeliest.",
        ),
        click.option(
            "--repetition-penalty",
            type=click.FloatRange(0, min_open=True),
            metavar="X",
            help="Divide logits of tokens in prompt or output; 1: leave them.",
        ),
        click.option(
            "--presence-penalty", type=click.FloatRange(-2, 2), metavar="X", help="Take from tokens in the output."
        ),
        click.option(
            "--frequency-penalty",
            type=click.FloatRange(-2, 2),
            metavar="X",
            help="The same each time they stand there.",
        ),
        click.option("--seed", type=int, metavar="N", help="The same seed gives the same text."),
        click.option(
            "--stop", "stop_strings", multiple=True, metavar="TEXT", help="End before this text appears; repeatable."
        ),
        click.option(
            "--logprobs",
            type=click.IntRange(0),
            metavar="N",
            help="Show how likely each token was, and the N likeliest.",
        ),
        click.option("--prompt-logprobs", type=click.IntRange(0), metavar="N", help="The same of the prompt."),
        click.option(
            "--timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="Give up after so long."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


class Bias(click.ParamType):  # type: ignore[type-arg]
    """ID=X."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=X, for example 42=-1.5", param, ctx)


@click.command()
@click.argument("prompt")
@with_generation
@click.option("--chat", "as_chat", is_flag=True, help="The prompt is a user's message: use the model's chat template.")
@click.option("--system", metavar="TEXT", help="Instructions before the message (implies --chat).")
@click.option(
    "--tools", "tools_json", type=_TEXT_FILE, metavar="FILE", help="Tool definitions: a JSON array (implies --chat)."
)
@click.option(
    "--logit-bias", type=Bias(), multiple=True, metavar="ID=X", help="Add X to the logit of this token; repeatable."
)
@click.option(
    "--allowed-token-id",
    "allowed_token_ids",
    type=click.IntRange(0),
    multiple=True,
    metavar="ID",
    help="Draw from these tokens alone; repeatable.",
)
@click.option(
    "--score-token-id",
    "score_token_ids",
    type=click.IntRange(0),
    multiple=True,
    metavar="ID",
    help="Show how likely this token was; repeatable.",
)
@click.option("--session-id", metavar="NAME", help="Keep the prompt in the server's prefix cache for longer.")
@click.option("--num-outputs", type=click.IntRange(1), metavar="N", help="Independent outputs of the one prompt.")
@click.option(
    "--json-schema", type=_TEXT_FILE, metavar="FILE", help="The output is JSON that validates against this JSON Schema."
)
@click.option("--regex", metavar="REGEX", help="The output matches this regular expression as a whole.")
@click.option("--choice", "choices", multiple=True, metavar="TEXT", help="The output is one of these; repeatable.")
@click.option(
    "--grammar", type=_TEXT_FILE, metavar="FILE", help="The output is a sentence of this Lark or EBNF grammar."
)
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line: deltas, then start, usage and timing.")
def generate(prompt: str, target: str, as_chat: bool, system: str | None, as_json: bool, **options: Any) -> None:
    """Stream text that continues PROMPT ('-': from stdin, but for its last line end). Ctrl-C ends the request on the
    server, too."""
    from photon_grpc.cli import terminal

    text = prompt
    if prompt == "-":
        with reading_stdin():
            text = sys.stdin.read().removesuffix("\n")  # what `echo` adds
    asked: Any = text
    if as_chat or system is not None or options["tools_json"] is not None:
        asked = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    try:
        asyncio.run(terminal.generate(target, asked, _only_set(options), as_json=as_json))
    except BrokenPipeError:
        # `photon-grpc generate ... | head`: the reader is gone. Python must not flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command()
@with_generation
@click.option("--system", default="", metavar="TEXT", help="Instructions before the conversation.")
def chat(target: str, system: str, **options: Any) -> None:
    """Talk with the served model; /help says what else can be typed."""
    from photon_grpc.cli import conversation

    with reading_stdin():
        conversation.chat(target, _only_set(options), system)


@click.command()
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("answers", metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@with_generation
@click.option("--concurrency", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="At a time.")
def batch(source: Path, answers: Path, target: str, concurrency: int, **options: Any) -> int:
    """Answer every line of IN.jsonl into OUT.jsonl; the same command again goes on where it was stopped.

    A line is an object with "prompt" (a text or a list of ids) or "messages", perhaps an "id", and options by their
    names ("max_tokens", "json_schema", …), which win over the flags; or a string. A full server is asked again.
    """
    from photon_grpc.cli.batch import batch as run_batch

    return run_batch(target, source, answers, _only_set(options), concurrency)


@contextlib.contextmanager
def reading_stdin() -> Iterator[None]:
    if sys.stdin is None:
        raise ConfigError("stdin is closed")
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin holds bytes that are no {error.encoding} text") from None


def _only_set(options: dict[str, Any]) -> Any:
    return {name: value for name, value in options.items() if value is not None and value != ()}
