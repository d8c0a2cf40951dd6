"""Constraints that mean the same have one digest, others have others."""

from __future__ import annotations

import json

import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.frontend.constraints.trial import try_out

SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "description": {"enum": ["title", {"default": 1}]}},
    "required": ["title"],
    "$defs": {"examples": {"type": "integer", "minimum": 3}},
}


def digest(kind: str, text: str, choices: tuple[str, ...] = ()) -> bytes:
    return try_out(ConstraintAsk(kind, text, choices)).digest


def schema(**changes: object) -> str:
    return json.dumps({**SCHEMA, **changes})


@pytest.mark.parametrize(
    "other",
    [
        schema(title="a", description="b", default={"title": "c"}, examples=[{}]),
        schema(**{"$comment": "nothing"}),
        json.dumps(dict(reversed(SCHEMA.items())), indent=2),
        schema(properties={**SCHEMA["properties"], "title": {"description": "of a book", "type": "string"}}),  # type: ignore[dict-item]
    ],
    ids=["annotations", "comment", "order and white space", "annotations within"],
)
def test_annotations_and_order_do_not_change_the_digest(other: str) -> None:
    assert digest("json_schema", other) == digest("json_schema", schema())


@pytest.mark.parametrize(
    "other",
    [
        schema(required=[]),
        schema(properties={"title": {"type": "string"}}),
        schema(properties={**SCHEMA["properties"], "description": {"enum": ["title", {"default": 2}]}}),  # type: ignore[dict-item]
    ],
    ids=["required", "a property called like an annotation", "a value that holds one"],
)
def test_what_changes_the_output_changes_the_digest(other: str) -> None:
    assert digest("json_schema", other) != digest("json_schema", schema())


def test_digests_of_other_kinds_of_constraints() -> None:
    assert digest("regex", "a+") != digest("regex", "a*b") != digest("grammar", "start: /a*b/")
    assert digest("grammar", "// of letters\nstart: /a+/\n") == digest("grammar", "start: /a+/")
    assert digest("choices", "", ("a", "b")) == digest("choices", "", ("b", "a")) != digest("choices", "", ("a", "c"))
