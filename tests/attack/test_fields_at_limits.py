"""Every scalar field of every request at its limits, alone and in pairs: an answer, or a refusal that says why."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from tests.attack.answers import Answer, answers, raw_call, strangers, tally
from tests.attack.figures import Figures
from tests.attack.size import Size
from tests.attack.victim import Victim, empty_request, path_of

_INTEGERS = (-1, 0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))
_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: range(-(2**31), 2**31),
    FieldDescriptor.CPPTYPE_INT64: range(-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT32: range(2**32),
    FieldDescriptor.CPPTYPE_UINT64: range(2**64),
}
_FLOATS = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e38, -1e38, 1e-38, 3.5e-46)
_TEXTS = ("", "\0", "<|im_start|>", "\u202e\u2066", "Z" + "\u0351\u0321" * 500, "🙂", "\ufffd\ufeff")


@dataclass(frozen=True)
class Limit:
    """A value for one field, found by the names on the way to it."""

    path: tuple[FieldDescriptor, ...]
    value: Any

    def apply(self, message: Any) -> None:
        for field in self.path[:-1]:
            target = getattr(message, field.name)
            if field.is_repeated:
                target = target[0] if len(target) else target.add()
            target.SetInParent()
            message = target
        last = self.path[-1]
        if last.message_type is not None:
            getattr(message, last.name).update(self.value)
        elif last.is_repeated:
            del getattr(message, last.name)[:]
            getattr(message, last.name).extend(self.value)
        else:
            setattr(message, last.name, self.value)


def limits(message: Descriptor, text_bytes: int, above: tuple[FieldDescriptor, ...] = ()) -> Iterator[Limit]:
    """Of every scalar field, at whatever depth."""
    for field in message.fields:
        path = (*above, field)
        if field.message_type is None:
            values = list(values_of(field, text_bytes))
            yield from (Limit(path, value) for value in (lists_of(values) if field.is_repeated else values))
        elif field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            if value.message_type is None:
                pairs = itertools.product(values_of(key, text_bytes), values_of(value, text_bytes))
                yield from (Limit(path, {key: value}) for key, value in pairs)
        elif field.message_type not in {field.message_type for field in above}:
            yield from limits(field.message_type, text_bytes, path)


def values_of(field: FieldDescriptor, text_bytes: int) -> Iterator[Any]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            yield from (b"", b"\xff" * 100, b"\0" * text_bytes)
        case FieldDescriptor.CPPTYPE_STRING:
            yield from (*_TEXTS, " " * text_bytes, "a" * text_bytes)
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            yield from _FLOATS
        case FieldDescriptor.CPPTYPE_BOOL:
            yield from (False, True)
        case FieldDescriptor.CPPTYPE_ENUM:
            yield from (0, 1, 2**31 - 1, -1)
        case kind:
            yield from (number for number in _INTEGERS if number in _RANGES[kind])


def lists_of(values: list[Any]) -> Iterator[list[Any]]:
    """One of each, two, many of the shortest, all."""
    shortest = min(values, key=lambda value: len(str(value)))
    yield from ([value] for value in values)
    yield from ([shortest] * 2, [shortest] * 5_000, values)


def base(method: MethodDescriptor) -> Message:
    """A request that is answered soon; its fields are found by name, for it is of the server's own descriptors."""
    message = empty_request(method)
    match message.DESCRIPTOR.name:
        case "GenerateRequest":
            message.text = "def"
            message.stop.max_tokens = 2
        case "TokenizeRequest":
            message.text = "def"
        case "DetokenizeRequest":
            message.token_ids.ids.append(5)
    return message


def with_limits(method: MethodDescriptor, *at: Limit) -> bytes:
    message = base(method)
    for limit in at:
        limit.apply(message)
    return message.SerializeToString()


@pytest.fixture
def methods(attacked: Victim) -> list[MethodDescriptor]:
    return [method for method in attacked.methods() if not method.client_streaming]


def calls(
    channel: grpc.aio.Channel, method: MethodDescriptor, sets: list[tuple[Limit, ...]]
) -> Iterator[Callable[[], Any]]:
    for at in sets:
        data = with_limits(method, *at)
        yield lambda data=data: raw_call(channel, path_of(method), [data], to_stream=method.server_streaming)


async def test_a_field_at_a_limit(
    attacked: Victim, methods: list[MethodDescriptor], size: Size, figures: Figures
) -> None:
    found: list[Answer] = []
    with attacked.unharmed():
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            for method in methods:
                each = [(limit,) for limit in limits(method.input_type, size.text_bytes)]
                found += await answers(calls(channel, method, each))
    figures.add(
        "fields at their limits", f"{len(found):,} requests, each field of {len(methods)} methods", tally(found)
    )
    assert strangers(found, "NOT_FOUND") == []
    assert {"OK", "INVALID_REQUEST"} <= set(tally(found))


async def test_pairs_of_fields_at_limits(
    attacked: Victim, methods: list[MethodDescriptor], size: Size, figures: Figures
) -> None:
    draw = random.Random(9)
    found: list[Answer] = []
    with attacked.unharmed():
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            for method in methods:
                singles = list(limits(method.input_type, min(size.text_bytes, 1 << 16)))
                count = size.pairs if len(singles) > 50 else size.pairs // 20
                pairs = [(draw.choice(singles), draw.choice(singles)) for _ in range(count if singles else 0)]
                found += await answers(calls(channel, method, pairs))
    figures.add("pairs of fields", f"{len(found):,} requests", tally(found))
    assert strangers(found, "NOT_FOUND") == []
