"""`generate`, `chat` and `batch`: the verbs that request text, each of which imports its work when it is called."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from photon_grpc.cli.terminal.generation_flags import (
    to_options,
    with_answer,
    with_chat_input,
    with_generation,
    with_one_request,
)
from photon_grpc.cli.terminal.numbers import WholeNumber
from photon_grpc.errors import ConfigError

#: Flags that imply a chat.
_CHAT = ("tools", "tools_json", "template_args_json")


@click.command()
@click.argument("prompt")
@with_generation
@click.option(
    "--chat",
    "as_chat",
    is_flag=True,
    help="The prompt is a user's message: use the model's chat template. "
    "--system, --tools, --tools-json and --template-args do so, too.",
)
@click.option("--system", metavar="TEXT", help="Instructions before the message.")
@with_chat_input
@with_answer
@with_one_request
@click.option("--json", "as_json", is_flag=True, help="A JSON object per line: deltas, then start, usage and timing.")
def generate(prompt: str, target: str, as_chat: bool, system: str | None, as_json: bool, **options: Any) -> None:
    """Stream text that continues PROMPT ('-' reads it from stdin). Ctrl-C also ends the request on the server."""
    from photon_grpc.cli.terminal import terminal

    text = prompt
    if prompt == "-":
        with reading_stdin():
            text = sys.stdin.read().removesuffix("\n")  # what `echo` adds
    request: Any = text
    if as_chat or system is not None or any(options[name] is not None for name in _CHAT):
        request = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
    try:
        asyncio.run(terminal.generate(target, request, to_options(options), as_json=as_json))
    except BrokenPipeError:
        # The reader has ended, as in `photon-grpc generate ... | head`; Python must not flush into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command()
@with_generation
@with_chat_input
@click.option("--system", default="", metavar="TEXT", help="Instructions before the conversation.")
def chat(target: str, system: str, **options: Any) -> None:
    """Talk with the served model; /help lists the commands."""
    from photon_grpc.cli.terminal import conversation

    with reading_stdin():
        conversation.chat(target, to_options(options), system)


@click.command()
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("answers", metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@with_generation
@with_answer
@click.option(
    "--concurrency", type=WholeNumber(1), default=64, show_default=True, metavar="N", help="Requests at a time."
)
@click.option("--overwrite", is_flag=True, help="Discard the answers in OUT.jsonl and answer every line again.")
def batch(source: Path, answers: Path, target: str, concurrency: int, overwrite: bool, **options: Any) -> int:
    """Answer every line of IN.jsonl into OUT.jsonl; run the same command again to resume.

    A line is a string, the prompt, or an object with "prompt" (a text or a list of ids) or "messages", optionally an
    "id", and options by name ("max_tokens", "json_schema", …), which override the flags. Requests that a full server
    rejects are retried.
    """
    from photon_grpc.cli.batch import batch as run_batch

    return run_batch(target, source, answers, to_options(options), concurrency, overwrite=overwrite)


@contextlib.contextmanager
def reading_stdin() -> Iterator[None]:
    if sys.stdin is None:
        raise ConfigError("stdin is closed")
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(f"stdin holds bytes that are not {error.encoding} text") from None
