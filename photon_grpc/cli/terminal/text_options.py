"""Options of the verbs that have a model read a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from photon_grpc.cli.terminal.numbers import WholeNumber, whole_number
from photon_grpc.errors import ConfigError


def reads_a_text(unset: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds DIR, --text, --num-tokens and --device; `unset` says what is read without --text."""
    options = (
        click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR"),
        click.option(
            "--text",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help=f"Text of the kind that the model will read. Unset: {unset}",
        ),
        whole_number("--num-tokens", "Most tokens of the text to read.", WholeNumber(1, 2**24), default=16384),
        click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def read_text(path: Path) -> str:
    """Return the text of a file. Raise ConfigError unless it is UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8", field="--text") from None
