"""Classes that answers are read as: their schemas, and objects of them, held against Pydantic's reading."""

from __future__ import annotations

import enum
import json
from dataclasses import InitVar, dataclass, field
from datetime import date, datetime, time
from typing import Any, ClassVar, Literal, Optional
from uuid import UUID

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.object_type import object_type_of
from photon_grpc.errors import InvalidRequest
from tests.examples import examples


class Color(enum.Enum):
    RED = "red"
    NUMBER = 1


@dataclass(frozen=True)
class Node:
    name: str
    next: Node | None = None


@dataclass
class Everything:
    kinds: ClassVar[int] = 9
    flag: bool
    count: int
    price: float
    nothing: None
    nodes: list[Node]
    pair: tuple[int, str]
    many: tuple[bool, ...]
    empty: tuple[()]
    counts: dict[str, list[int]]
    word: Literal["a", 2, True, None, Color.RED]
    color: Color
    moment: datetime
    day: Optional[date]  # noqa: UP045 -- both spellings of a union
    hour: time
    key: UUID
    either: Node | int | str
    made: int = field(default=0, init=False)
    tags: list[str] = field(default_factory=list)


class Item(pydantic.BaseModel):
    cents: int = pydantic.Field(ge=0)


class Open(pydantic.BaseModel, extra="allow"):
    items: list[Item]


@pydantic.dataclasses.dataclass
class Inner:
    item: Item


texts = st.text(max_size=5)
nodes = st.recursive(st.builds(Node, texts), lambda inner: st.builds(Node, texts, inner), max_leaves=3)
everything = st.builds(
    Everything,
    flag=st.booleans(),
    count=st.integers(),
    price=st.floats(allow_nan=False, allow_infinity=False),
    nothing=st.none(),
    nodes=st.lists(nodes, max_size=2),
    pair=st.tuples(st.integers(), texts),
    many=st.lists(st.booleans(), max_size=3).map(tuple),
    empty=st.just(()),
    counts=st.dictionaries(texts, st.lists(st.integers(), max_size=2), max_size=2),
    word=st.sampled_from(["a", 2, True, None]),
    color=st.sampled_from(Color),
    moment=st.datetimes(),
    day=st.none() | st.dates(),
    hour=st.times(),
    key=st.uuids(),
    either=nodes | st.integers() | texts,
    tags=st.lists(texts, max_size=2),
)


def read(cls: type, text: str) -> Any:
    object_type = object_type_of({"json_schema": cls})
    assert object_type is not None
    return object_type.read(text)


def schema(cls: type) -> Any:
    object_type = object_type_of({"json_schema": cls})
    assert object_type is not None
    return json.loads(object_type.schema)


@settings(max_examples=examples(60))
@given(everything)
def test_an_object_is_read_from_the_json_that_pydantic_writes_of_it(whole: Everything) -> None:
    text = pydantic.TypeAdapter(Everything).dump_json(whole, exclude={"made"}).decode()
    found = read(Everything, text)
    assert found == whole
    assert (type(found.price), type(found.word)) == (float, type(whole.word))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"name":5}', "Node.name cannot be read from int"),
        ('{"name":"a","next":{"name":[]}}', "Node.name cannot be read from list; Node.next cannot be read from dict"),
        ("[]", "Node cannot be read from list"),
        ('{"name":"a","other":1}', "Node has no field 'other'"),
        ("{}", "name"),
        ('{"name":"a"', "delimiter"),
    ],
)
def test_json_that_is_not_an_object_is_refused(text: str, told: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        read(Node, text)
    assert told in str(refused.value)


def test_a_day_that_does_not_exist_is_named() -> None:
    @dataclass
    class Invoice:
        issued: date

    with pytest.raises(ValueError, match=r"Invoice.issued: day is out of range"):
        read(Invoice, '{"issued":"2023-02-29"}')


def test_a_boolean_is_not_a_number() -> None:
    @dataclass
    class Switch:
        level: Literal[1, 2]

    with pytest.raises(ValueError, match=r"Switch.level cannot be read from bool"):
        read(Switch, '{"level":true}')


def test_the_schema_has_every_field_and_no_other() -> None:
    of_node = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
        "required": ["name"],
        "additionalProperties": False,
    }
    assert schema(Node) == {"$ref": "#/$defs/Node", "$defs": {"Node": of_node}}
    whole = schema(Everything)["$defs"]["Everything"]
    assert list(whole["properties"]) == [name for name in Everything.__annotations__ if name not in ("kinds", "made")]
    assert set(whole["properties"]) - set(whole["required"]) == {"tags"}


def test_classes_with_equal_names_are_distinct() -> None:
    def item(kind: type) -> type:
        return dataclass(type("Item", (), {"__annotations__": {"value": kind}}))

    pair = dataclass(type("Pair", (), {"__annotations__": {"a": item(int), "b": item(str)}}))
    found = read(pair, '{"a":{"value":1},"b":{"value":"x"}}')
    assert (found.a.value, found.b.value) == (1, "x")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (set[int], r"Odd\.field is set\[int\], which has no JSON Schema here; there are str, int"),
        (Any, r"Odd\.field is typing\.Any|Odd\.field is Any"),
        (object, r"Odd\.field is object"),
        (bytes, r"Odd\.field is bytes"),
        (list, r"Odd\.field is list"),
        (dict[int, str], r"Odd\.field is dict\[int, str\]"),
        (list[complex], r"Odd\.field\[\] is complex"),
        (int | bytes, r"Odd\.field is bytes"),
        ("Nowhere", "the type hints of Odd cannot be read: name 'Nowhere' is not defined"),
        (InitVar[int], r"Odd\.field is an argument and no field"),
        (enum.Enum("Empty", ()), r"Odd\.field is an Enum without members"),
        (enum.Enum("Lists", {"A": (1, 2)}), r"Odd\.field may be \(1, 2\)"),
    ],
)
def test_a_field_without_a_schema_is_named_with_its_type(kind: Any, told: str) -> None:
    odd = dataclass(type("Odd", (), {"__annotations__": {"field": kind}}))
    with pytest.raises(TypeError, match=told):
        object_type_of({"json_schema": odd})


def test_models_of_pydantic_are_closed_unless_they_say_otherwise() -> None:
    assert schema(Open)["additionalProperties"] is True
    assert schema(Open)["$defs"]["Item"]["additionalProperties"] is False
    assert read(Open, '{"items":[{"cents":5}],"more":1}').items == [Item(cents=5)]
    assert read(Inner, '{"item":{"cents":5}}') == Inner(item=Item(cents=5))
    with pytest.raises(pydantic.ValidationError):
        read(Inner, '{"item":{"cents":-5}}')


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": int}, "json_schema"),
        ({"json_schema": Node, "text": False}, "text"),
        ({"json_schema": Node, "include_stop_in_text": True}, "include_stop_in_text"),
        ({"json_schema": Node, "skip_special_tokens": False}, "skip_special_tokens"),
        ({"json_schema": Node, "continue_from": [1]}, "continue_from"),
    ],
)
def test_options_that_leave_no_object_to_read_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        object_type_of(options)
    assert refused.value.field == field


def test_schemas_that_are_not_classes_are_left_alone() -> None:
    for given_schema in (None, "{}", {}, {"type": "object"}):
        assert object_type_of({"json_schema": given_schema, "text": False}) is None
