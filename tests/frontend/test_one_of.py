"""`oneOf` of references is accepted if the schemas exclude each other, and then means `anyOf`."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.json_schema import exact_schema
from photon_grpc.frontend.constraints.trial import byte_tokenizer, try_out

CAT, DOG = {"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}


def animal(kind: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": kind, **more},
        "required": ["kind", *more],
        "additionalProperties": False,
    }


#: A dog has puppies, each of which is one of the same two.
DEFS = {
    "Cat": animal({"const": "cat"}, lives={"type": "integer"}),
    "Dog": animal({"$ref": "#/$defs/Kind"}, pups={"type": "array", "items": {"oneOf": [CAT, DOG]}}),
    "Kind": {"enum": ["dog", "wolf"]},
    "Animal": animal({"type": "string"}),
    "Optional": {**animal({"const": "x"}), "required": []},
    "Kinds": {"enum": ["cat", "dog"]},
    "AnyCat": animal({"$ref": "#/$defs/Kinds"}),
    "Loose": {"properties": {"kind": {"const": "y"}}, "required": ["kind"]},
    "Number": {"type": "number"},
    "a/b": {"type": ["string", "null"]},
}


def takes(schema: dict[str, Any], text: str) -> bool:
    constraint = try_out(ConstraintAsk("json_schema", json.dumps(schema)))
    matcher = llguidance.LLMatcher(byte_tokenizer(), constraint.grammar)
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"kind":"cat","lives":9}', True),
        ('{"kind":"wolf","pups":[]}', True),
        ('{"kind":"dog","pups":[{"kind":"cat","lives":7},{"kind":"dog","pups":[]}]}', True),
        ('{"kind":"cat","pups":[]}', False),
        ('{"kind":"dog","pups":[{"kind":"cat","pups":[]}]}', False),
        ('{"kind":"bird"}', False),
    ],
)
def test_branches_with_different_property_values_are_exclusive(text: str, is_valid: bool) -> None:
    assert takes({"oneOf": [CAT, DOG], "$defs": DEFS}, text) == is_valid


def test_branches_of_different_types_are_exclusive() -> None:
    schema = {"items": {"oneOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/Number"}, CAT]}, "$defs": DEFS}
    for text in ('["a",1.5,null]', '[{"kind":"cat","lives":1}]'):
        assert takes(schema, text)
    assert not takes(schema, "[true]")


@pytest.mark.parametrize(
    "other",
    [
        *({"$ref": f"#/$defs/{name}"} for name in ("Cat", "Animal", "Optional", "AnyCat", "Loose", "Missing")),
        {"$ref": "https://example.com/x"},
        {},
    ],
)
def test_branches_that_one_value_may_satisfy_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidConstraint, match=r"exclude each other|not found|not present|Pointer"):
        takes({"oneOf": [CAT, other], "$defs": DEFS}, "")


def test_an_integer_is_a_number() -> None:
    one_of = [{"$ref": "#/$defs/Number"}, {"type": "integer"}]
    assert "anyOf" not in exact_schema(json.dumps({"oneOf": one_of, "$defs": {"Number": DEFS["Number"]}}))


def test_values_are_no_schemas() -> None:
    schema = json.dumps({"const": {"oneOf": [CAT, DOG]}, "$defs": DEFS | {"Dog": animal({"const": "dog"})}})
    assert exact_schema(schema) == schema
    for text in ('{"oneOf": "$ref"', '{"oneOf": [{"$ref": 1}, 3, {"$ref": "#/$defs/~"}]}'):
        assert exact_schema(text) == text


def test_references_that_start_elsewhere_are_not_followed() -> None:
    schema = {"oneOf": [CAT, {"$ref": "#/$defs/Number"}], "$defs": {"Cat": DEFS["Cat"], "Number": DEFS["Number"]}}
    assert "anyOf" in exact_schema(json.dumps({"$id": "https://example.com/a", **schema}))
    within = json.dumps({"items": {"$id": "https://example.com/a", **schema}})
    assert exact_schema(within) == within
