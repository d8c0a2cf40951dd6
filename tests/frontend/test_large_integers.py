"""Constants and bounds that a float would round are refused, with the number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.ask import ConstraintAsk
from photon_grpc.frontend.grammar_trial import try_out
from photon_grpc.frontend.large_integers import rounded_integer


@pytest.mark.parametrize(
    ("schema", "number"),
    [
        ({"const": 9007199254740993}, 9007199254740993),
        ({"enum": ["a", 1234567890123456789]}, 1234567890123456789),
        ({"properties": {"id": {"const": [{"k": -(2**53) - 1}]}}}, -(2**53) - 1),
        ({"type": "integer", "maximum": 2**62 - 1}, 2**62 - 1),
        ({"const": 10**400 + 1}, 10**400 + 1),
    ],
)
def test_what_would_be_rounded_is_told(schema: dict[str, Any], number: int) -> None:
    assert rounded_integer(json.dumps(schema)) == number


def test_the_caller_is_told_the_number() -> None:
    with pytest.raises(InvalidConstraint, match=r"json_schema: 1234567890123456789 would be rounded"):
        try_out(ConstraintAsk("json_schema", json.dumps({"const": 1234567890123456789})))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53},
        {"enum": [2**60, "1234567890123456789"]},
        {"type": "integer", "minimum": -(2**62), "maximum": 2**62},
        {"default": 2**53 + 1, "examples": [2**53 + 1], "type": "integer"},
        {"properties": {"const": {"type": "string", "description": "9007199254740993"}}},
    ],
)
def test_other_numbers_are_taken(schema: dict[str, Any]) -> None:
    assert rounded_integer(json.dumps(schema)) is None
    try_out(ConstraintAsk("json_schema", json.dumps(schema)))
