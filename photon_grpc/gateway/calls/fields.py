"""Tables of the fields of an HTTP API: each is supported, accepted without effect, or refused. Others are unknown."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_origin

import msgspec

from photon_grpc.core.ask import CacheAsk, OutputAsk, SamplingAsk, SchedulingAsk, StopAsk, StreamAsk
from photon_grpc.core.fields import FIELDS
from photon_grpc.errors import FeatureNotSupported, InvalidRequest

_STRUCTS: dict[str, Callable[..., Any]] = {
    "sampling": SamplingAsk,
    "stop": StopAsk,
    "output": OutputAsk,
    "cache": CacheAsk,
    "scheduling": SchedulingAsk,
    "stream": StreamAsk,
}
#: Characters of a caller's name in an error message.
_MAX_NAME = 100
#: Objects in a list, such as messages, which take about 20 ms to convert.
MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Supported:
    """A field with an effect."""

    #: Its type, as msgspec converts it.
    kind: Any
    #: The option of `core.fields` that it sets; empty: the API's own code reads it.
    option: str = ""
    #: Converts the value to that of the option.
    adapt: Callable[[Any], Any] | None = None
    #: For the documents.
    note: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A field that has no effect here and cannot change an answer."""

    note: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer, and is not supported."""

    note: str
    #: Values that ask for nothing beyond what is done anyway.
    harmless: tuple[Any, ...] = ()


Table = Mapping[str, Supported | Accepted | Refused]


class Values(NamedTuple):
    """The fields of one body. Fields that are null are unset."""

    #: Those that are supported, converted.
    supported: dict[str, Any]
    #: Names of those without effect.
    ignored: tuple[str, ...]

    def get(self, name: str, default: Any = None) -> Any:
        return self.supported.get(name, default)


def read(table: Table, body: Mapping[str, Any]) -> Values:
    """Return the fields of a body. Raise InvalidRequest, also for an unknown name, and FeatureNotSupported."""
    supported: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in body.items():
        entry = table.get(name)
        if entry is None:
            raise unknown_field(name, table)
        if value is None:
            continue
        if type(value) is list and len(value) > MAX_ENTRIES and type(value[0]) is dict:
            message = f"{name}: has {len(value)} entries; {MAX_ENTRIES} are allowed"
            raise InvalidRequest(message, field=name, needed=len(value), limit=MAX_ENTRIES)
        if isinstance(entry, Supported):
            supported[name] = converted(value, entry.kind, name)
        elif isinstance(entry, Accepted):
            ignored.append(name)
        elif not _is_among(value, entry.harmless):
            raise FeatureNotSupported(f"{name}: {entry.note}", field=name)
    return Values(supported, tuple(ignored))


def converted(value: Any, kind: Any, field: str) -> Any:
    """Return the value as `kind`. Raise InvalidRequest naming the place within the field."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `")
        # The place of a key is "key` in `$".
        path = field + place.rpartition("`$" if "`$" in place else "$")[2].rstrip("`")
        if isinstance(value, dict) and (key := _wrong_key(value, kind)) is not None:
            path = f"{field}[{json.dumps(key[:_MAX_NAME])}]"
            what = "The name must be a whole number" if place.startswith("key`") else what
        raise InvalidRequest(f"{path}: {what[:1].lower()}{what[1:]}", field=path) from None


def _wrong_key(value: Mapping[str, Any], kind: Any) -> str | None:
    """Return the first key of an object that is no `kind` alone with its value; None if `kind` has names of its own."""
    if get_origin(kind) not in (dict, Mapping):
        return None
    for key, each in value.items():
        try:
            msgspec.convert({key: each}, kind, str_keys=True)
        except msgspec.ValidationError:
            return key
    return None


def unknown_field(name: str, table: Mapping[str, Any], within: str = "") -> InvalidRequest:
    """Return the error for a name that the API does not have, with the name it resembles."""
    name = name[:_MAX_NAME]
    close = difflib.get_close_matches(name, table, n=1, cutoff=0.7)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return InvalidRequest(f"{within}{name}: there is no such field{hint}", field=f"{within}{name}")


def groups(table: Table, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options that the fields set, by group, as the structs of an Ask take them.

    Raise InvalidRequest for fields that set one option to different values.
    """
    found: dict[str, dict[str, Any]] = {}
    setters: dict[str, str] = {}
    for name, value in values.items():
        entry = table[name]
        if isinstance(entry, Supported) and entry.option:
            field = FIELDS[entry.option]
            options, value = found.setdefault(field.group, {}), entry.adapt(value) if entry.adapt else value
            if options.setdefault(field.attribute, value) != value:
                message = f"{name}: {setters[entry.option]} has a different value; both set one option"
                raise InvalidRequest(message, field=name)
            setters.setdefault(entry.option, name)
    return found


def structs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the groups as keyword arguments of an Ask."""
    return {group: _STRUCTS[group](**options) for group, options in found.items()}


def names(table: Table) -> dict[str, str]:
    """Return the API's name of each option that it sets, by the path that errors have."""
    paths = {
        FIELDS[entry.option].path: name
        for name, entry in table.items()
        if isinstance(entry, Supported) and entry.option
    }
    # In gRPC a list of token ids is a message with the field `ids`; in JSON it is the list.
    return paths | {f"{path}.ids": name for path, name in paths.items()}


def _is_among(value: Any, harmless: tuple[Any, ...]) -> bool:
    # 1 == True, but true is no number.
    return any(type(value) is type(each) and value == each for each in harmless)
