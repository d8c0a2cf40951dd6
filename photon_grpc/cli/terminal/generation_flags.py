"""Flags of `generate`, `chat` and `batch`: one for every option of a request that declares help.

Unset options have the model's defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_origin

import click

from photon_grpc.cli.terminal.connection import with_target
from photon_grpc.cli.terminal.numbers import Number, WholeNumber
from photon_grpc.core.field import ALL_VERBS, ANSWERS, CONVERSATIONS, ONE_REQUEST, Field
from photon_grpc.core.fields import FIELDS, fields_of
from photon_grpc.errors import ConfigError, InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])
#: Larger bounds are limits of the wire format, of no interest to a user.
_LARGE = 2**31 - 1


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


class _ToolsFile(_TextFile):
    """A file with a JSON array of objects; '-' is stdin."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        text = super().convert(value, parameter, context)
        try:
            tools = json.loads(text)
        except (ValueError, RecursionError) as error:
            self.fail(f"{value}: is not JSON: {error}", parameter, context)
        if not isinstance(tools, list):
            self.fail(f"{value}: must be a JSON array of tools", parameter, context)
        return tools


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
    """A token id and its bias: ID=X."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        token_id, _, bias = str(value).partition("=")
        try:
            number, _ = int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=X, such as 42=-1.5", param, ctx)
        return number, _number(FIELDS["logit_bias"], float).convert(bias, param, ctx)


class _Label(click.ParamType):  # type: ignore[type-arg]
    """The key and the value of a label: KEY=VALUE."""

    name = "label"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        key, equals, text = str(value).partition("=")
        if not key or not equals:
            self.fail(f"{value!r} is not KEY=VALUE, such as team=search", param, ctx)
        return key, text


class _Ids(click.ParamType):  # type: ignore[type-arg]
    """A list of token ids: ID,ID,…."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        try:
            return [int(each) for each in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r} is not ID,ID,…, such as 5,17,3", param, ctx)


def _number(field: Field, kind: type) -> WholeNumber | Number:
    """Return the type of a number within the field's bounds, as far as they are known without the model."""
    bounds = field.bounds
    if bounds is None or bounds.least < -_LARGE:
        return WholeNumber() if kind is int else Number()
    most = bounds.most if isinstance(bounds.most, int) and bounds.most < _LARGE else None
    if kind is int:
        return WholeNumber(int(bounds.least), most, off=bounds.off)
    least = int(bounds.least) if float(bounds.least).is_integer() else bounds.least  # shown without ".0"
    return Number(least, most, is_open=bounds.is_open)


def _type_of(field: Field) -> Any:
    """Return the type of a flag's value, or of each value if the flag is repeatable."""
    if field.name == "tools":
        return _ToolsFile()
    by_metavar = {
        "FILE": _TextFile(),
        "FILE MESSAGE": (_BinaryFile(), str),
        "ID=X": _Bias(),
        "KEY=VALUE": _Label(),
        "ID,…": _Ids(),
    }
    if field.metavar in by_metavar:
        return by_metavar[field.metavar]
    if field.kind in (int, float):
        return _number(field, field.kind)
    return WholeNumber(0) if field.kind == Sequence[int] else str


def _metavar(field: Field) -> str:
    if field.metavar or field.unit:
        return field.metavar or "SECONDS"
    return {int: "N", float: "X", Sequence[int]: "ID"}.get(field.kind, "TEXT")


def _flag(field: Field) -> Callable[[F], F]:
    name = field.flag or "--" + field.name.replace("_", "-")
    if field.kind is bool:
        return click.option(name, field.name, is_flag=True, flag_value=not field.default, default=None, help=field.help)
    is_list = get_origin(field.kind) in (Sequence, Mapping) and field.metavar not in ("ID,…", "FILE")
    text = f"{field.help}; repeatable." if is_list else field.help
    return click.option(name, field.name, type=_type_of(field), metavar=_metavar(field), multiple=is_list, help=text)


def _flags(verbs: str) -> list[Callable[[F], F]]:
    """Return the flags that exactly these verbs have."""
    return [
        _flag(field)
        for group in ("", "stop", "sampling", "structured_output", "output", "cache", "scheduling", "chat")
        for field in fields_of(group)
        if field.help and field.verbs == verbs
    ]


def with_generation(function: F) -> F:
    """Add the flags of all verbs that generate."""
    return _with([with_target, *_flags(ALL_VERBS)], function)


def with_chat_input(function: F) -> F:
    """Add the flags of verbs that generate one answer after another."""
    return _with(_flags(CONVERSATIONS), function)


def with_answer(function: F) -> F:
    """Add the flags of verbs whose answers programs can read."""
    return _with(_flags(ANSWERS), function)


def with_one_request(function: F) -> F:
    """Add the flags that make sense for a single request."""
    return _with(_flags(ONE_REQUEST), function)


def _with(options: Iterable[Callable[[F], F]], function: F) -> F:
    for option in reversed([*options]):
        function = option(function)
    return function


def to_options(flags: dict[str, Any]) -> Any:
    """Return the options of the client's calls: the flags that were set, by field name. Raise ConfigError."""
    options = {name: value for name, value in flags.items() if value is not None and value != ()}
    for name in {"logit_bias", "labels"} & options.keys():
        options[name] = dict(options[name])
    if "message_type" in options:
        options["message_type"] = _message_type(*options["message_type"])
    return options


def _message_type(descriptor_set: bytes, name: str) -> Any:
    from photon_grpc.client.message_type import find_message_type

    try:
        return find_message_type(descriptor_set, name)
    except InvalidRequest as error:
        problem = str(error).removeprefix("message_type: ")
        raise ConfigError(f"--protobuf: {problem}", field="--protobuf") from None
