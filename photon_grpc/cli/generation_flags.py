"""Flags of a generation, which `generate`, `chat` and `batch` share: one for every field of a request that can be told
on a command line. Unset ones are left to the model's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from photon_grpc.cli.connection import with_target
from photon_grpc.errors import ConfigError, InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])


class _TextFile(click.ParamType[str]):
    """A file's text; '-' is stdin."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        try:
            with click.open_file(value, encoding="utf-8") as file:
                return str(file.read())
        except OSError as error:
            self.fail(f"{value}: {error.strerror}", parameter, context)
        except UnicodeDecodeError as error:
            self.fail(f"{value}: {error}", parameter, context)


class _BinaryFile(click.ParamType[bytes]):
    """A file's bytes; '-' is stdin."""

    name = "file"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> bytes:
        try:
            with click.open_file(value, "rb") as file:
                return bytes(file.read())
        except OSError as error:
            self.fail(f"{value}: {error.strerror}", parameter, context)


class _Bias(click.ParamType):  # type: ignore[type-arg]
    """ID=X."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=X, for example 42=-1.5", param, ctx)


class _Ids(click.ParamType):  # type: ignore[type-arg]
    """ID,ID,…"""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        try:
            return [int(each) for each in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not ID,ID,…, for example 5,17,3", param, ctx)


_ID = click.IntRange(0)
_COUNT = click.IntRange(1)
_SECONDS = click.FloatRange(0, min_open=True)
_TEXT_FILE = _TextFile()


def _one(name: str, kind: Any, metavar: str, help: str, *field: str) -> Callable[[F], F]:
    """A flag of one value; `field`: the option of a generation, where it has another name."""
    return click.option(name, *field, type=kind, metavar=metavar, help=help)


def _many(name: str, field: str, kind: Any, metavar: str, help: str) -> Callable[[F], F]:
    return click.option(name, field, type=kind, multiple=True, metavar=metavar, help=f"{help}; repeatable.")


def _switch(name: str, help: str, *field: str, value: bool = True) -> Callable[[F], F]:
    return click.option(name, *field, is_flag=True, flag_value=value, default=None, help=help)


_SAMPLING = (
    _one("--temperature", click.FloatRange(0), "X", "0 is greedy."),
    _one("--top-p", float, "X", "Draw from the likeliest tokens with this share of probability."),
    _one("--top-k", int, "N", "Draw from this many of the likeliest tokens; -1: from all."),
    _one("--min-p", click.FloatRange(0, 1), "X", "Draw from tokens at least this likely relative to the likeliest."),
    _one(
        "--repetition-penalty",
        click.FloatRange(0, min_open=True),
        "X",
        "Divide logits of tokens in prompt or output; 1: leave them.",
    ),
    _one("--presence-penalty", click.FloatRange(-2, 2), "X", "Take from tokens in the output."),
    _one("--frequency-penalty", click.FloatRange(-2, 2), "X", "The same each time they stand there."),
    _many("--logit-bias", "logit_bias", _Bias(), "ID=X", "Add X to the logit of this token"),
    _many("--allowed-token-id", "allowed_token_ids", _ID, "ID", "Draw from these tokens alone"),
    _one("--seed", int, "N", "Draw with the noise of this seed; unset: of one that the server draws."),
)

_STOPS = (
    _one("--max-tokens", _COUNT, "N", "Tokens to produce at most; unset: what the context holds."),
    _one("--min-tokens", click.IntRange(0), "N", "Tokens to produce before an end or a stop may come."),
    _many("--stop", "stop_strings", str, "TEXT", "End before this text appears"),
    _many("--stop-token-id", "stop_token_ids", _ID, "ID", "End when this token is drawn"),
    _switch("--ignore-eos", "The model's end of text is a token like others: go on behind it."),
    _switch("--include-stop-in-text", "Show what the output ended at, too."),
    _one("--max-duration", _SECONDS, "SECONDS", "End after so long and keep what was produced."),
)

_CONSTRAINTS = (
    _one("--json-schema", _TEXT_FILE, "FILE", "The output is JSON that validates against this JSON Schema."),
    _switch("--json-object", "The output is a JSON object."),
    _one("--regex", str, "REGEX", "The output matches this regular expression as a whole."),
    _many("--choice", "choices", str, "TEXT", "The output is one of these"),
    _one("--grammar", _TEXT_FILE, "FILE", "The output is a sentence of this Lark or EBNF grammar."),
    _one(
        "--protobuf",
        (_BinaryFile(), str),
        "FILE MESSAGE",
        "The output is JSON of this message, which the file, a serialized FileDescriptorSet, describes.",
    ),
)

_OUTPUT = (
    _one("--logprobs", click.IntRange(0), "N", "Show how likely each token was, and the N likeliest."),
    _many("--score-token-id", "score_token_ids", _ID, "ID", "Show how likely this token was"),
    _one("--prompt-logprobs", click.IntRange(0), "N", "As --logprobs, of the prompt."),
    _switch("--keep-special-tokens", "Special tokens are part of the text.", "skip_special_tokens", value=False),
)

_SERVICE = (
    _one("--salt", str, "TEXT", "Share cached prefixes only with requests of the same salt."),
    _switch("--bypass-prefix-cache", "Neither read nor write the server's prefix cache."),
    _one("--priority", int, "N", "Higher runs first."),
    _one("--max-queue-duration", _SECONDS, "SECONDS", "Give up when waiting for a place takes longer."),
    _one("--timeout", _SECONDS, "SECONDS", "Give up after so long."),
)

_GENERATION = (
    with_target,
    _one("--model", str, "NAME", "A model that it serves; unset: its default."),
    *(*_STOPS, *_SAMPLING, *_CONSTRAINTS, *_OUTPUT, *_SERVICE),
)

_CHAT_INPUT = (
    _one("--tools", _TEXT_FILE, "FILE", "Tool definitions: a JSON array (implies a chat).", "tools_json"),
    _one("--tool-choice", str, "CHOICE", "required: the output calls tools; or the name of the one that it calls."),
    _one(
        "--template-args",
        str,
        "JSON",
        "Variables for the chat template (implies a chat): '{\"enable_thinking\": false}'.",
        "template_args_json",
    ),
    _one("--session-id", str, "NAME", "Keep the prompt in the server's prefix cache for longer."),
)

_ANSWER = (
    _one("--num-outputs", _COUNT, "N", "Independent outputs of the one prompt."),
    _switch("--token-ids", "JSON holds the ids of the output, too."),
    _switch("--parse-special-tokens", "Spellings of special tokens in the prompt are those tokens."),
)

_ONE_REQUEST = (
    _switch("--prompt-token-ids", "JSON holds the ids of the prompt, too."),
    _one("--continue-from", _Ids(), "ID,…", "Go on behind these tokens of an output, which are not shown again."),
    _one("--request-id", str, "ID", "The request's name in the server's log and traces."),
)


def with_generation(function: F) -> F:
    """Flags of all verbs that generate."""
    return _with(_GENERATION, function)


def with_chat_input(function: F) -> F:
    """Flags of verbs that generate one answer after the other."""
    return _with(_CHAT_INPUT, function)


def with_answer(function: F) -> F:
    """Flags of verbs whose answers can be read by programs."""
    return _with(_ANSWER, function)


def with_one_request(function: F) -> F:
    """Flags that make sense for a single request."""
    return _with(_ONE_REQUEST, function)


def _with(options: tuple[Callable[[F], F], ...], function: F) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def to_options(flags: dict[str, Any]) -> Any:
    """Options of the client's calls: flags that were given, by the fields' names. Raise ConfigError."""
    options = {name: value for name, value in flags.items() if value is not None and value != ()}
    if "logit_bias" in options:
        options["logit_bias"] = dict(options["logit_bias"])
    if "protobuf" in options:
        options["message_type"] = _message_type(*options.pop("protobuf"))
    return options


def _message_type(descriptor_set: bytes, name: str) -> Any:
    from photon_grpc.client.message_type import find_message_type

    try:
        return find_message_type(descriptor_set, name)
    except InvalidRequest as error:
        problem = str(error).removeprefix("message_type: ")
        raise ConfigError(f"--protobuf: {problem}", field="--protobuf") from None
