"""The JSON of a protobuf message as a Lark grammar, whose every text protobuf's own JSON parser accepts.

To ensure that, it is narrower than proto3 JSON. Fields appear in the order of their declaration, each at most once and
at most one of a oneof. Nothing is `null` unless it must be. Enum values are names. Numbers are in the range of their
type. Escaped surrogates come in pairs. No grammar can forbid duplicate keys of a map; the parser keeps the last value.
https://protobuf.dev/programming-guides/json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from photon_grpc.server.typed.field_forms import AS_TYPED, FieldForm
from photon_grpc.server.typed.message_graph import (
    ANY_FORM,
    MAX_DEPTH,
    ONE_VALUE,
    MessageGraph,
    entry_field,
    is_map,
)

#: Fields in all rules; compiling them takes about 50 ms.
_MAX_RULE_FIELDS = 512
#: Entries of a list or a map whose own bound is greater. The compiler's greatest count has 32 bits.
_MAX_ENTRIES = 2**16
#: Depth of a google.protobuf.Value, each level of which is three messages on the wire.
_MAX_VALUE_DEPTH = 24

UNESCAPED = r'[^"\\\x00-\x1f]'
ESCAPED = (
    r'\\["\\\/bfnrt]'
    r"|\\u([0-9A-Ca-cE-Fe-f][0-9a-fA-F]{3}|[Dd][0-7][0-9a-fA-F]{2})"
    r"|\\u[Dd][89ABab][0-9a-fA-F]{2}\\u[Dd][C-Fc-f][0-9a-fA-F]{2}"
)
#: The unused bits of the last character are 0.
_BASE64 = r'"([A-Za-z0-9+\/]{4})*([A-Za-z0-9+\/][AQgw]==|[A-Za-z0-9+\/]{2}[AEIMQUYcgkosw048]=)?"'
_PATH = r"[a-z][a-zA-Z0-9]*(\.[a-z][a-zA-Z0-9]*)*"
_NAME = "[a-z][a-zA-Z0-9]{0,31}"
_FRACTION = r"(\.([0-9]{3}|[0-9]{6}|[0-9]{9}))?"
_DATE = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_MANTISSA = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,17})?"


def _positive(limit: int) -> str:
    """Return a regular expression for the integers from 1 to `limit`, without leading zeros."""
    digits = str(limit)
    ways = [f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else []
    for at, digit in enumerate(digits):
        least = "1" if at == 0 else "0"
        if digit > least:
            ways.append(f"{digits[:at]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - at - 1}}}")
    return "|".join([*ways, digits])


def _integer(least: int, most: int) -> str:
    return f"0|{_positive(most)}" + (f"|-({_positive(-least)})" if least else "")


_INT32, _UINT32 = _integer(-(2**31), 2**31 - 1), _integer(0, 2**32 - 1)
_INT64, _UINT64 = _integer(-(2**63), 2**63 - 1), _integer(0, 2**64 - 1)

#: Terminals by name. A grammar contains only those that it uses.
_TERMINALS = {
    "STRING": f'"({UNESCAPED}|{ESCAPED})*"',
    "BYTES": _BASE64,
    "BOOL": "true|false",
    "INT32": _INT32,
    "UINT32": _UINT32,
    "INT64": f'"({_INT64})"',
    "UINT64": f'"({_UINT64})"',
    # Below 1e37 and 1e304, which the types can hold.
    "FLOAT": rf"{_MANTISSA}([eE](\+?(0|[1-9]|1[0-9]|2[0-1])|-[1-9][0-9]?))?",
    "DOUBLE": rf"{_MANTISSA}([eE](\+?(0|[1-9][0-9]?|1[0-9]{{2}}|2[0-8][0-9])|-([1-9][0-9]?|[12][0-9]{{2}})))?",
    "TIMESTAMP": f'"{_DATE}T{_TIME}{_FRACTION}Z"',
    "DURATION": f'"-?((0|{_positive(315_575_999_999)}){_FRACTION}|315576000000)s"',
    "FIELD_MASK": f'"({_PATH}(,{_PATH})*)?"',
    "STRING_KEY": f'"({UNESCAPED}|{ESCAPED})*":',
    "INT32_KEY": f'"({_INT32})":',
    "UINT32_KEY": f'"({_UINT32})":',
    "INT64_KEY": f'"({_INT64})":',
    "UINT64_KEY": f'"({_UINT64})":',
}
_F = FieldDescriptor
_SCALARS = {
    _F.TYPE_DOUBLE: "DOUBLE",
    _F.TYPE_FLOAT: "FLOAT",
    _F.TYPE_BOOL: "BOOL",
    _F.TYPE_STRING: "STRING",
    _F.TYPE_BYTES: "BYTES",
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), "INT32"),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), "UINT32"),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), "INT64"),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), "UINT64"),
}


class ValueBounds(NamedTuple):
    """The most that one value holds, where its type sets no bound."""

    #: Characters of a string, or of a map's key.
    chars: int
    #: Entries of a list or a map.
    entries: int


def _bounded(bounds: ValueBounds) -> dict[str, str]:
    """Return the terminals that texts of any length have, bounded."""
    char = f"({UNESCAPED}|{ESCAPED}){{0,{bounds.chars}}}"
    groups = f"([A-Za-z0-9+\\/]{{4}}){{0,{bounds.chars // 4}}}"
    path = f"{_NAME}(\\.{_NAME}){{0,3}}"
    return {
        "STRING": f'"{char}"',
        "STRING_KEY": f'"{char}":',
        "BYTES": _BASE64.replace(r"([A-Za-z0-9+\/]{4})*", groups),
        "FIELD_MASK": f'"({path}(,{path}){{0,{bounds.entries - 1}}})?"',
    }


class TooManyFields(Exception):
    """Raised if the rules for a depth have too many fields."""


class JsonGrammar:
    """The rules for one message type with messages (and map entries) nested to a depth. Raises TooManyFields.

    `bounds` holds what has none of its own; None: nothing is bounded. With `max_messages` the text is that many
    messages or fewer, each followed by a line feed.
    """

    def __init__(
        self, graph: MessageGraph, depth: int, bounds: ValueBounds | None = None, max_messages: int | None = None
    ) -> None:
        self._graph = graph
        self._bodies = _TERMINALS if bounds is None else {**_TERMINALS, **_bounded(bounds)}
        #: Of a list or a map without a bound of its own.
        self._max_entries = None if bounds is None else bounds.entries
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._names: dict[tuple[object, ...], str] = {}
        #: Messages whose rules are still to be written: name, type, depth.
        self._open: list[tuple[str, Descriptor, int]] = []
        self._num_fields = 0
        root = self._message(graph.root, depth)
        self._rules["start"] = root if max_messages is None else f'({root} "\\n"){{0,{max_messages}}}'
        while self._open:
            self._write_message(*self._open.pop())

    @property
    def text(self) -> str:
        """The grammar as llguidance reads it."""
        return "\n".join([f"{name}: {body}" for name, body in (self._rules | self._terminals).items()])

    def _message(self, message: Descriptor, depth: int) -> str:
        """Return the symbol of a message that fits `depth`."""
        if message.full_name in ONE_VALUE:
            return self._terminal(ONE_VALUE[message.full_name])
        if message.full_name in ANY_FORM:
            return self._any_form(ANY_FORM[message.full_name], min(depth, _MAX_VALUE_DEPTH))
        depth = min(depth, self._graph.height(message))
        name, is_new = self._name("m", message.full_name, depth)
        if is_new:
            self._open.append((name, message, depth))
        return name

    def _write_message(self, name: str, message: Descriptor, depth: int) -> None:
        """Write a chain of rules: the opening brace with the first field present, then each further field or none."""
        slots = [
            (self._choices(fields, depth), is_required) for fields, is_required in self._graph.forms.slots(message)
        ]
        slots = [(choices, is_required) for choices, is_required in slots if choices]
        self._num_fields += sum([len(choices) for choices, _ in slots])
        if self._num_fields > _MAX_RULE_FIELDS:
            raise TooManyFields
        first: list[str] = []
        for at, (choices, is_required) in enumerate(slots, start=1):
            first += [f"{_literal('{' + key)} {value} {name}_{at}" for key, value in choices]
            if is_required:
                break
        else:
            first.append(_literal("{}"))
        self._rules[name] = " | ".join(first)
        for at, (choices, is_required) in enumerate(slots[1:], start=1):
            ways = [f"{_literal(',' + key)} {value} {name}_{at + 1}" for key, value in choices]
            self._rules[f"{name}_{at}"] = " | ".join(ways if is_required else [*ways, f"{name}_{at + 1}"])
        if slots:
            self._rules[f"{name}_{len(slots)}"] = _literal("}")

    def _choices(self, fields: tuple[FieldDescriptor, ...], depth: int) -> list[tuple[str, str]]:
        """Return key and value of the fields that fit."""
        values = [(field, self._field(field, depth - 1)) for field in fields]
        return [(json.dumps(field.json_name, ensure_ascii=False) + ":", value) for field, value in values if value]

    def _field(self, field: FieldDescriptor, depth: int) -> str:
        """Return the symbol of a field whose messages may have `depth`; "" if they do not fit."""
        form = self._graph.forms.of(field)
        if is_map(field):
            return self._map(field, form, depth) if depth >= 1 else ""
        value = self._element(field, form, depth)
        if value and field.is_repeated:
            return self._entries("[]", value, form)
        is_null = field.enum_type is not None and field.enum_type.full_name == "google.protobuf.NullValue"
        return _literal("null") if is_null else value

    def _element(self, field: FieldDescriptor, form: FieldForm, depth: int) -> str:
        if form.value:
            return self._narrow(form.value)
        message = field.message_type
        if message is not None:
            return self._message(message, depth) if self._graph.least_depth(message) <= depth else ""
        if field.enum_type is not None:
            return self._enum(field.enum_type)
        return self._terminal(_SCALARS[field.type])

    def _map(self, field: FieldDescriptor, form: FieldForm, depth: int) -> str:
        key = entry_field(field, "key")
        value = self._element(entry_field(field, "value"), form, depth - 1)
        if not value:
            return ""
        if key.type == _F.TYPE_BOOL:
            return self._bool_map(value, form)
        own = self._narrow(form.key) if form.key else self._terminal(f"{_SCALARS[key.type]}_KEY")
        return self._entries("{}", f"{own} {value}", form)

    def _bool_map(self, value: str, form: FieldForm) -> str:
        """Return the symbol of a map with each of two keys at most once."""
        if form.key:  # which is one of the two
            one = form._replace(max_entries=0 if form.max_entries == 0 else 1)
            return self._entries("{}", f"{self._narrow(form.key)} {value}", one)
        least, most = self._num_entries(form)
        name, is_new = self._name("b", value, least, most)
        if is_new:
            false, true = [f"{_literal(key)} {value}" for key in ('"false":', '"true":')]
            ways = (_literal("{}"), f'"{{" ({false} | {true}) "}}"', f'"{{" {false} "," {true} "}}"')
            kept = [way for at, way in enumerate(ways) if at >= least and (most is None or at <= most)]
            self._rules[name] = " | ".join(kept)
        return name

    def _num_entries(self, form: FieldForm) -> tuple[int, int | None]:
        """Return the least and the most entries of a list or a map."""
        least, most = form.min_entries, form.max_entries
        if most is None:
            return least, None if self._max_entries is None else max(self._max_entries, least)
        return least, max(min(most, _MAX_ENTRIES), least)

    def _entries(self, brackets: str, entry: str, form: FieldForm) -> str:
        """Return the symbol of a list or an object of entries."""
        least, most = self._num_entries(form)
        name, is_new = self._name("l", brackets, entry, least, most)
        if is_new:
            begin, end = map(_literal, brackets)
            empty = f"{_literal(brackets)} | " if least == 0 else ""
            more = "" if most == 1 else f'("," {entry}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
            self._rules[name] = _literal(brackets) if most == 0 else f"{empty}{begin} {entry} {more} {end}"
        return name

    def _any_form(self, kind: str, depth: int) -> str:
        """Return the symbol of a Value, Struct or ListValue. A Value is two levels deep in a Struct, one in a list."""
        name, is_new = self._name("v", kind, depth)
        if not is_new:
            return name
        if kind == "value":
            ways = [_literal("null"), *[self._terminal(each) for each in ("BOOL", "DOUBLE", "STRING")]]
            ways += [self._any_form(each, depth - 1) for each in ("struct", "list")] if depth > 1 else []
            self._rules[name] = " | ".join(ways)
        elif kind == "struct":
            value = self._any_form("value", depth - 2) if depth > 2 else ""
            self._rules[name] = self._struct(value) if value else _literal("{}")
        else:
            value = self._any_form("value", depth - 1) if depth > 1 else ""
            self._rules[name] = self._entries("[]", value, AS_TYPED) if value else _literal("[]")
        return name

    def _struct(self, value: str) -> str:
        return self._entries("{}", f"{self._terminal('STRING_KEY')} {value}", AS_TYPED)

    def _narrow(self, body: str) -> str:
        name = f"N{self._name('n', body)[0]}".upper()
        self._terminals[name] = body
        return name

    def _enum(self, enum: EnumDescriptor) -> str:
        name = f"E{self._name('e', enum.full_name)[0]}".upper()
        if name not in self._terminals:
            names = dict.fromkeys(value.name for value in enum.values)
            self._terminals[name] = " | ".join([_literal(f'"{each}"') for each in names])
        return name

    def _terminal(self, name: str) -> str:
        self._terminals.setdefault(name, f"/{self._bodies[name]}/")
        return name

    def _name(self, prefix: str, *key: object) -> tuple[str, bool]:
        """Return a rule's name, and whether it is new."""
        known = self._names.get((prefix, *key))
        if known is not None:
            return known, False
        name = self._names[prefix, *key] = f"{prefix}{len(self._names)}"
        return name, True


def write_json_grammar(
    graph: MessageGraph, bounds: ValueBounds | None = None, max_messages: int | None = None, max_depth: int = MAX_DEPTH
) -> JsonGrammar:
    """Write the grammar, as deep as its size and `max_depth` allow. Raise TooManyFields."""
    most = max(max_depth, graph.least_depth(graph.root))
    depths: Iterator[int] = (most >> halvings for halvings in range(most.bit_length()))
    for depth in depths:
        if depth < graph.least_depth(graph.root):
            break
        try:
            return JsonGrammar(graph, depth, bounds, max_messages)
        except TooManyFields:
            continue
    raise TooManyFields


def _literal(text: str) -> str:
    return json.dumps(text)
