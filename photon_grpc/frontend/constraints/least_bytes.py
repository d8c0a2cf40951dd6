"""A lower bound of the bytes of an output that satisfies a constraint.

By this bound, a deadline that no such output can meet is refused.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import PhotonError
from photon_grpc.frontend.constraints.json_schema import referred
from photon_grpc.frontend.constraints.least_chars import least_chars
from photon_grpc.frontend.constraints.tools import read_tools

#: Limits of what is read, which takes some milliseconds: characters of the whole, schemas within it (or characters of
#: patterns), and their depth. Beyond them a schema counts as satisfied by a digit.
_MAX_CHARS, _MAX_SCHEMAS, _MAX_DEPTH = 2**16, 1_000, 40
_SCHEMA_CHARS = 4
_ANY = 1
#: The characters of the shortest string of a format.
_FORMATS = {
    "date": 10,
    "time": 9,
    "date-time": 20,
    "duration": 3,
    "email": 3,
    "hostname": 1,
    "ipv4": 7,
    "ipv6": 2,
    "uri": 2,
    "uuid": 36,
}
_TYPES = {"null": 4, "boolean": 4, "number": 1, "integer": 1}
#: Bytes of a member without name and value, and of a member with an empty name, a digit and a comma.
_COLON, _MEMBER = 3, 5


def least_bytes(ask: ConstraintAsk) -> int:
    """Return the bound of a constraint that compiles, 0 if nothing is known."""
    if ask.kind == "json_schema":
        return _least_of_schema(ask.text)
    if ask.kind == "choices":
        return min([len(choice.encode()) for choice in ask.choices])
    if ask.kind == "regex":
        return least_chars(ask.text)
    if ask.kind == "tool_calls":
        return _least_of_calls(ask)
    return 2 if ask.kind == "json_object" else 0


def _least_of_calls(ask: ConstraintAsk) -> int:
    try:
        tools = read_tools(ask)
    except PhotonError:
        return 0
    texts = [(tool.name, msgspec.json.encode(tool.schema).decode()) for tool in tools]
    return min([len(name.encode()) + _least_of_schema(schema) for name, schema in texts])


def _least_of_schema(schema: str) -> int:
    if len(schema) > _MAX_CHARS:
        return 0
    try:
        root = json.loads(schema)
        return _Lengths(root, has_bases=schema.count('"$id"') > 0).least(root, 0)
    except (ValueError, RecursionError):
        return 0


class _Lengths:
    """The bounds of the schemas within `root`."""

    def __init__(self, root: Any, *, has_bases: bool) -> None:
        self._root = root
        #: Whether references may start anywhere.
        self._has_bases = has_bases
        self._num_left = _MAX_SCHEMAS
        #: Bounds by reference. While a schema is read, a reference to itself counts as satisfied by a digit.
        self._referred: dict[str, int] = {}

    def least(self, schema: Any, depth: int) -> int:
        self._num_left -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._num_left < 0:
            return _ANY
        if "$ref" in schema:  # some drafts ignore whatever stands beside it
            return self._least_referred(schema["$ref"], depth)
        bounds = [_ANY, self._least_of_types(schema, depth)]
        if "const" in schema:
            bounds.append(_least_of_value(schema["const"]))
        if schema.get("enum") and isinstance(schema["enum"], list):
            bounds.append(min([_least_of_value(value) for value in schema["enum"]]))
        for keyword, chosen in (("anyOf", min), ("oneOf", min), ("allOf", max)):
            schemas = schema.get(keyword)
            if isinstance(schemas, list) and schemas:
                bounds.append(chosen([self.least(each, depth + 1) for each in schemas]))
        return max(bounds)

    def _least_referred(self, reference: Any, depth: int) -> int:
        if not isinstance(reference, str) or not reference.startswith("#/") or self._has_bases or "%" in reference:
            return _ANY
        if reference not in self._referred:
            self._referred[reference] = _ANY
            self._referred[reference] = self.least(referred(self._root, reference), depth + 1)
        return self._referred[reference]

    def _least_of_types(self, schema: dict[str, Any], depth: int) -> int:
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types:
            return _ANY
        return min([self._least_of_type(kind, schema, depth) for kind in types])

    def _least_of_type(self, kind: Any, schema: dict[str, Any], depth: int) -> int:
        if kind == "string":
            return self._least_of_string(schema)
        if kind == "array":
            return self._least_of_array(schema, depth)
        if kind == "object":
            return self._least_of_object(schema, depth)
        return _TYPES.get(kind, _ANY) if isinstance(kind, str) else _ANY

    def _least_of_string(self, schema: dict[str, Any]) -> int:
        pattern, name = schema.get("pattern"), schema.get("format")
        bounds = [_count(schema, "minLength")]
        if isinstance(pattern, str):
            self._num_left -= len(pattern) // _SCHEMA_CHARS
            bounds.append(least_chars(pattern) if self._num_left > 0 else 0)
        if isinstance(name, str):
            bounds.append(_FORMATS.get(name, 0))
        return 2 + max(bounds)

    def _least_of_array(self, schema: dict[str, Any], depth: int) -> int:
        num_items = _count(schema, "minItems")
        items = schema.get("items")
        # Drafts differ in which keywords may stand together.
        is_plain = isinstance(items, dict) and "prefixItems" not in schema and "additionalItems" not in schema
        item = self.least(items, depth + 1) if is_plain and num_items else _ANY
        return 2 + num_items * (item + 1) - (num_items > 0)

    def _least_of_object(self, schema: dict[str, Any], depth: int) -> int:
        properties, required = schema.get("properties"), schema.get("required")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        known = properties if isinstance(properties, dict) else {}
        members = [
            len(name.encode(errors="ignore")) + _COLON + self.least(known.get(name), depth + 1) + 1
            for name in sorted(names)
        ]
        num_more = max(_count(schema, "minProperties") - len(members), 0)
        return 2 + sum(members) + num_more * _MEMBER - (len(members) + num_more > 0)


def _least_of_value(value: Any) -> int:
    """Return the bound of a constant; a number counts as a digit."""
    if isinstance(value, str):
        return 2 + len(value.encode(errors="ignore"))
    if isinstance(value, list):
        return 2 + sum(map(_least_of_value, value)) + max(len(value) - 1, 0)
    if isinstance(value, dict):
        names = sum([len(name.encode(errors="ignore")) + _COLON for name in value])
        return 2 + names + sum(map(_least_of_value, value.values())) + max(len(value) - 1, 0)
    return _ANY if isinstance(value, int | float) and not isinstance(value, bool) else 4


def _count(schema: dict[str, Any], keyword: str) -> int:
    count = schema.get(keyword)
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 0
