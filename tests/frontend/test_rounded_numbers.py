"""Constants and bounds that the compiler would round are refused, with the number."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.json_schema import problem_of
from photon_grpc.frontend.constraints.trial import try_out
from tests.frontend.outputs import Outputs


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
def test_numbers_that_would_be_rounded_are_named(schema: dict[str, Any], number: int) -> None:
    assert problem_of(json.dumps(schema)).startswith(f"{str(number)[:40]} would be rounded")


def test_the_error_names_the_number() -> None:
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
def test_other_numbers_are_accepted(schema: dict[str, Any]) -> None:
    assert not problem_of(json.dumps(schema))
    try_out(ConstraintAsk("json_schema", json.dumps(schema)))


def test_fractions_that_the_compiler_reads_as_the_next_float() -> None:
    """The library misreads some constants of 17 digits and writes other numbers; those that we accept stay equal."""
    draw = random.Random(5)
    num_refused = 0
    for _ in range(60):
        number = draw.uniform(0, 10) * 10 ** draw.randint(-9, 8)
        try:
            outputs = Outputs.of_schema({"const": number})
        except InvalidConstraint as error:
            assert "would be rounded" in error.message
            num_refused += 1
        else:
            assert format(Decimal(repr(number)), "f") in outputs
    assert 0 < num_refused < 30
    for number in (0.1, 1 / 3, 2 / 3, 0.30000000000000004, 1e-7, 1e300):
        assert format(Decimal(repr(number)), "f") in Outputs.of_schema({"const": number})
