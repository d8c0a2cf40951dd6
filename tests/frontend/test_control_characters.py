"""Schemas with control characters: what cannot be written is refused where it would be left out of an output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.json_schema import problem_of
from photon_grpc.frontend.constraints.trial import try_out


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "a\x01"},
        {"const": {"k": ["\x1f"]}},
        {"enum": ["a", "b\x7f"]},
        *[
            {"pattern": text}
            for text in ("^a\x01b", r"a\x01", r"\u001Fb", r"\x{1}", r"a\a", r"\v?", r"[\x01]", r"\x7F")
        ],
        *[{"pattern": text} for text in (r"^a\U00000007b$", r"\U{7}")],
        {"properties": {"const": {"pattern": r"a\x07b"}}},
        {"properties": {"a": {"items": {"patternProperties": {r"^\x02": {}}}}}},
    ],
)
def test_what_cannot_be_written_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidConstraint, match="control characters"):
        try_out(ConstraintAsk("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 'é\b\f\n\r\t"\\/'},
        {"const": "\\x01 \\u0001 \\a"},
        {"description": "\x01", "const": "a"},
        {"properties": {"a\x01": {}}, "required": ["a\x01"]},
        {"properties": {"enum": {"description": "\x01"}, "const": {"description": "\x01"}}},
        {"type": "string", "examples": [{"const": "\x07"}], "default": {"pattern": r"\x07"}},
        *[{"type": "string", "pattern": text} for text in (r"^[^\x00-\x1f\x7f]{2}$", r"^[^\\\x00-\x1f]+$", r"\\x01")],
        *[{"type": "string", "pattern": text} for text in ("^[^\x00-\x1f]$", r"^[^]\x01]$", r"\A\n\t\x41\x{42}\u00e9")],
    ],
)
def test_other_schemas_are_accepted(schema: dict[str, Any]) -> None:
    try_out(ConstraintAsk("json_schema", json.dumps(schema)))


@pytest.mark.parametrize("text", ['{"a": "\\\\x01"', '"\\\\v"'])
def test_unreadable_schemas_are_left_to_the_compiler(text: str) -> None:
    assert not problem_of(text)
