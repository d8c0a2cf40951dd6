"""Options of a generation by name, as typed in `chat` and as given in lines of `batch`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from photon_grpc.client import Options
from photon_grpc.client.message_type import find_message_type
from photon_grpc.core.field import Field
from photon_grpc.core.fields import FIELDS, fields_of
from photon_grpc.core.option_names import our_name

#: Options that constrain an output; a request has at most one of them.
CONSTRAINTS = frozenset({"tool_choice", *(field.name for field in fields_of("structured_output"))})
#: Values of these options that mean no constraint.
_NO_CONSTRAINT = (None, False, "auto")
_TYPES: Mapping[str, Any] = get_type_hints(Options)
_SWITCHES = {"true": True, "on": True, "false": False, "off": False}


def check_name(name: str) -> str:
    """Return the name. Raise ValueError if there is no such option."""
    if name not in _TYPES:
        raise ValueError(no_option(name, _TYPES))
    return name


def no_option(name: str, known: Collection[str]) -> str:
    """Return the error message for a name that is not in `known`."""
    near = our_name(name, known)
    return f"there is no option {name}" + (f"; did you mean {near}?" if near else "")


def read_option(name: str, text: str) -> Any:
    """Return the value of an option. Raise ValueError, InvalidRequest."""
    read, expected = _READERS[_TYPES[check_name(name)]]
    try:
        value = read(text)
    except (KeyError, ValueError, TypeError, AttributeError, OSError, RecursionError):
        raise ValueError(f"{name} must be {expected}, got {text!r}") from None
    if name in FIELDS:
        _check(FIELDS[name], value)
    return value


def _check(field: Field, value: Any) -> None:
    """Check what is known without the model. Raise InvalidRequest."""
    if field.is_checked:
        field.check(value)
    elif field.bounds is not None:
        field.check_each([*value.items()])


def set_option(options: dict[str, Any], name: str, value: Any) -> None:
    """Set an option; a constraint replaces any other, and a value that means no constraint removes it."""
    if name in CONSTRAINTS:
        for other in {name} if value in _NO_CONSTRAINT else CONSTRAINTS:
            options.pop(other, None)
    if name not in CONSTRAINTS or value not in _NO_CONSTRAINT:
        options[name] = value


def read_bias(biases: Mapping[str, float]) -> dict[Any, float]:
    """Convert the names of a JSON object to token ids."""
    return {int(token) if token.isdecimal() else token: bias for token, bias in biases.items()}


def _read_list(kind: type) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        values = json.loads(text)
        if not isinstance(values, list) or any(type(each) is not kind for each in values):
            raise ValueError
        return values

    return read


def _read_typed_bias(text: str) -> dict[Any, float]:
    return {int(token): float(bias) for token, bias in json.loads(text).items()}


def _read_labels(text: str) -> dict[str, str]:
    labels = json.loads(text)
    if not isinstance(labels, dict) or any(type(value) is not str for value in labels.values()):
        raise ValueError
    return labels


def _read_json(text: str) -> str:
    json.loads(text)
    return text


def _read_message_type(text: str) -> Any:
    path, name = text.rsplit(maxsplit=1)
    return find_message_type(Path(path).expanduser().read_bytes(), name)


_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (lambda text: _SWITCHES[text.lower()], "on or off"),
    str: (str, "a text"),
    Sequence[int]: (_read_list(int), "a JSON list of ids: [5, 17]"),
    Sequence[str]: (_read_list(str), 'a JSON list of texts: ["a", "b"]'),
    _TYPES["tools"]: (_read_list(dict), 'a JSON list of tools: [{"name": "now"}]'),
    _TYPES["logit_bias"]: (_read_typed_bias, 'a JSON object of ids: {"42": -1.5}'),
    _TYPES["labels"]: (_read_labels, 'a JSON object of texts: {"team": "search"}'),
    _TYPES["json_schema"]: (_read_json, "a JSON Schema"),
    _TYPES["message_type"]: (_read_message_type, "the file of a FileDescriptorSet and the name of a message"),
}
