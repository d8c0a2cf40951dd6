"""The messages that a message type may hold, checked. What JSON cannot be constrained to is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message

from photon_grpc.errors import InvalidConstraint
from photon_grpc.server.typed.field_forms import BY_TYPE, FieldForms

FIELD = "structured_output.protobuf.file_descriptor_set"
#: Nesting of messages, map entries included. Parsers accept 100.
MAX_DEPTH = 32
_MAX_FIELDS = 512
#: Every decoding step considers all fields that may come next.
_MAX_FIELDS_OF_MESSAGE = 128
_MAX_ENUM_VALUES = 2048
_MODULES: tuple[ModuleType, ...] = (
    *(any_pb2, api_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2, source_context_pb2, struct_pb2),
    *(timestamp_pb2, type_pb2, wrappers_pb2),
)
#: Files that a set may omit. Those that it contains are ignored in favour of these.
WELL_KNOWN_FILES: dict[str, bytes] = {module.DESCRIPTOR.name: module.DESCRIPTOR.serialized_pb for module in _MODULES}
#: Message -> its file.
WELL_KNOWN_TYPES: dict[str, str] = {
    message.full_name: module.DESCRIPTOR.name
    for module in _MODULES
    for message in module.DESCRIPTOR.message_types_by_name.values()
}
#: Messages whose JSON is a single value.
ONE_VALUE: Mapping[str, str] = {
    "google.protobuf.Timestamp": "TIMESTAMP",
    "google.protobuf.Duration": "DURATION",
    "google.protobuf.FieldMask": "FIELD_MASK",
    "google.protobuf.DoubleValue": "DOUBLE",
    "google.protobuf.FloatValue": "FLOAT",
    "google.protobuf.Int64Value": "INT64",
    "google.protobuf.UInt64Value": "UINT64",
    "google.protobuf.Int32Value": "INT32",
    "google.protobuf.UInt32Value": "UINT32",
    "google.protobuf.BoolValue": "BOOL",
    "google.protobuf.StringValue": "STRING",
    "google.protobuf.BytesValue": "BYTES",
}
#: Messages whose JSON may have any form.
ANY_FORM: Mapping[str, str] = {
    "google.protobuf.Value": "value",
    "google.protobuf.Struct": "struct",
    "google.protobuf.ListValue": "list",
}
#: Attributes of every Python message, which hide fields of these names from the JSON parser.
_TAKEN_NAMES = frozenset(dir(Message))


class _Edge(NamedTuple):
    """A field's value as a step to deeper messages."""

    #: A message; empty: an entry of a map, which is a message itself.
    child: str
    #: 1 for a map of messages, whose entry lies between; -1 for what is no message.
    between: int = 0


class MessageGraph:
    """All messages that can be reached from `root`. Raises InvalidConstraint.

    `forms` says which fields must be present.
    """

    def __init__(self, root: Descriptor, pool: DescriptorPool, forms: FieldForms = BY_TYPE) -> None:
        self.root = root
        self.forms = forms
        #: Messages -> their fields' edges.
        self._edges: dict[str, list[_Edge]] = {}
        #: Messages -> the edges of each required slot, of which a value has one.
        self._required: dict[str, list[list[_Edge]]] = {}
        self._reach(pool)
        fixed = {name: MAX_DEPTH for name in self._edges if name in ANY_FORM}
        self._heights = _depths({name: [[edge] for edge in edges] for name, edges in self._edges.items()}, fixed)
        self._least = _depths(self._required, {})
        if self._least[root.full_name] > MAX_DEPTH:
            problem = f"{root.full_name} requires more than {MAX_DEPTH} messages within one another"
            raise refused(problem, limit=MAX_DEPTH)

    def height(self, message: Descriptor) -> int:
        """Return the depth of the message's deepest value, at most MAX_DEPTH."""
        return min(self._heights[message.full_name], MAX_DEPTH)

    def least_depth(self, message: Descriptor) -> int:
        """Return the depth of the message's smallest value."""
        return self._least[message.full_name]

    def _reach(self, pool: DescriptorPool) -> None:
        root = self.root.full_name
        num_fields, num_values = 0, dict[str, int]()
        waiting = [(self.root, root)]
        while waiting:
            message, holder = waiting.pop()
            if message.full_name in self._edges:
                continue
            _check_message(message, holder, pool)
            self._edges[message.full_name] = [_edge(field) for field in fields_of(message)]
            self._required[message.full_name] = self._required_edges(message)
            for field in fields_of(message):
                num_fields += 1
                _check_count(num_fields, _MAX_FIELDS, f"fields are reached from {root}")
                _check_field(field)
                child = value_type(field)
                if child is not None:
                    waiting.append((child, field.full_name))
                enum = value_of(field).enum_type
                if enum is not None:
                    num_values[enum.full_name] = len(enum.values)
                    _check_count(sum(num_values.values()), _MAX_ENUM_VALUES, f"enum values are reached from {root}")

    def _required_edges(self, message: Descriptor) -> list[list[_Edge]]:
        if message.full_name in ONE_VALUE or message.full_name in ANY_FORM:
            return []
        return [[_edge(field) for field in slot.fields] for slot in self.forms.slots(message) if slot.is_required]


def _edge(field: FieldDescriptor) -> _Edge:
    child = value_type(field)
    if child is not None:
        return _Edge(child.full_name, int(is_map(field)))
    return _Edge("", 0 if is_map(field) else -1)


def _depths(edges: Mapping[str, list[list[_Edge]]], fixed: Mapping[str, int]) -> dict[str, int]:
    """Return each message's nesting along the longest path, at most MAX_DEPTH + 1, by the shortest of each choice."""
    depths = {"": 1, **dict.fromkeys(edges, 1), **fixed}
    changed = True
    while changed:
        changed = False
        for name, outgoing in edges.items():
            deepest = max(
                [min([depths[edge.child] + edge.between for edge in choice]) for choice in outgoing], default=0
            )
            depth = min(1 + deepest, MAX_DEPTH + 1)
            if depth > depths[name]:
                depths[name], changed = depth, True
    return depths


def fields_of(message: Descriptor) -> Iterator[FieldDescriptor]:
    """Yield the fields that the message has in JSON."""
    if message.full_name not in ONE_VALUE and message.full_name not in ANY_FORM:
        yield from message.fields


def is_map(field: FieldDescriptor) -> bool:
    message = field.message_type
    return message is not None and message.GetOptions().map_entry


def entry_field(field: FieldDescriptor, name: str) -> FieldDescriptor:
    """Return the field "key" or "value" of a map's entries."""
    entry: Any = field.message_type
    found: FieldDescriptor = entry.fields_by_name[name]
    return found


def reached_from(root: Descriptor) -> Iterator[Descriptor]:
    """Yield a message and all that it may hold, whatever its JSON. Raise InvalidConstraint for an entry of no map."""
    waiting, seen = [root], {root.full_name}
    while waiting:
        message = waiting.pop()
        yield message
        for field in message.fields:
            _check_map(field)
            child = value_type(field)
            if child is not None and child.full_name not in seen:
                seen.add(child.full_name)
                waiting.append(child)


def value_of(field: FieldDescriptor) -> FieldDescriptor:
    """Return the field itself, or for a map the value field of its entries."""
    return entry_field(field, "value") if is_map(field) else field


def value_type(field: FieldDescriptor) -> Descriptor | None:
    """Return the message type of the field or of a map's values; None if they are not messages."""
    return value_of(field).message_type


def refused(problem: str, *, needed: float | None = None, limit: float | None = None) -> InvalidConstraint:
    return InvalidConstraint(f"{FIELD}: {problem}", field=FIELD, needed=needed, limit=limit)


def _check_message(message: Descriptor, holder: str, pool: DescriptorPool) -> None:
    name = message.full_name
    if name == "google.protobuf.Any":
        raise refused(f"{holder} is a google.protobuf.Any, which is of no one type")
    extensions = pool.FindAllExtensions(message)
    if extensions:
        raise refused(f"{extensions[0].full_name} extends {name}; extensions are not supported")
    if name.startswith("google.protobuf.") and message.file.name not in WELL_KNOWN_FILES:
        raise refused(f"{name} is defined in {message.file.name}, not by protobuf")
    for field in message.fields:
        _check_map(field)
    _check_count(len(message.fields), _MAX_FIELDS_OF_MESSAGE, f"fields has {name}")
    keys = Counter([field.json_name for field in fields_of(message)])
    keys.update([group.name for group in message.oneofs])
    for key, count in keys.items():
        if count > 1:
            raise refused(f"{name} has {count} fields or oneofs that are called {key!r} in JSON")


def _check_map(field: FieldDescriptor) -> None:
    """Raise InvalidConstraint for entries whose fields are not called as protoc calls them, which protobuf takes."""
    entry = field.message_type
    if entry is not None and is_map(field) and {each.name for each in entry.fields} != {"key", "value"}:
        raise refused(f"{field.full_name}: {entry.full_name} is not an entry of a map")


def _check_field(field: FieldDescriptor) -> None:
    if field.type == FieldDescriptor.TYPE_GROUP:
        raise refused(f"{field.full_name} is a group; groups are not supported")
    if field.name in _TAKEN_NAMES:
        raise refused(f"{field.full_name}: protobuf's JSON parser cannot set a field of this name")


def _check_count(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise refused(f"{number} or more {what}; {limit} are allowed", needed=number, limit=limit)
