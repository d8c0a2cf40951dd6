"""Numbers keep their bounds: every accepted number lies within them by exact arithmetic.

Rounded to a 64-bit float it does, too, unless it is very near to an exclusive bound on the side of 0.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations, product

import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.call_form import CallForm, CallSyntax
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.json_schema import exact_schema, problem_of
from tests.frontend.outputs import Outputs

BOUNDS = ("-100", "-4.001", "-4", "-0.5", "0", "0.1", "0.30000000000000004", "1", "4", "4.001", "9007199254740992")
INCLUSIVE, EXCLUSIVE = ("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")
#: Distances by which a bound is moved.
NEAR = ("0", "1e-20", "1e-15", "1e-7", "0.0005", "1")


def spelled(number: Decimal) -> Iterator[str]:
    plain = format(number, "f")
    yield plain
    yield from (f"{plain}.0", f"{plain}.00", f"{plain}e0") if "." not in plain else (f"{plain}0", f"{plain}e0")
    yield f"{format(number / 10, 'f')}e1"
    if not number:
        yield "-0"
        yield "-0.0"


def texts_near(bounds: tuple[str, ...]) -> set[str]:
    moved = (Decimal(bound) + sign * Decimal(by) for bound in bounds for by in NEAR for sign in (1, -1))
    return {text for number in moved for text in spelled(number)}


def within(text: str, schema: dict[str, str]) -> bool:
    """Return whether a number is within the bounds, by exact arithmetic and as a float."""
    for keyword, bound in schema.items():
        way = -1 if keyword.lower().endswith("maximum") else 1
        least_distance = (Decimal(text) - Decimal(bound)) * way
        float_distance = (float(text) - float(bound)) * way
        is_exclusive, is_far = keyword.startswith("exclusive"), way * Decimal(bound) < 0
        if least_distance < 0 or (is_exclusive and least_distance == 0):
            return False
        if float_distance < 0 or (is_exclusive and not is_far and float_distance == 0):
            return False
    return True


def schemas() -> Iterator[dict[str, str]]:
    for keyword, bound in product((*INCLUSIVE, *EXCLUSIVE), BOUNDS):
        yield {keyword: bound}
    for (low, high), lower, upper in product(
        combinations(BOUNDS, 2), ("minimum", EXCLUSIVE[0]), ("maximum", EXCLUSIVE[1])
    ):
        yield {lower: low, upper: high}


def text_of(kind: str, bounds: dict[str, str]) -> str:
    return "{" + ",".join([f'"type":"{kind}"', *(f'"{keyword}":{bound}' for keyword, bound in bounds.items())]) + "}"


def test_accepted_numbers_are_within_the_bounds_and_short_decimals_within_are_accepted() -> None:
    wrong, missing, num_taken = [], [], 0
    for bounds in schemas():
        outputs = Outputs.of_schema(text_of("number", bounds))
        for text in texts_near((*bounds.values(), "0")):
            is_taken, is_within = text in outputs, within(text, bounds)
            num_taken += is_taken
            if is_taken and not is_within:
                wrong.append((bounds, text))
            if is_within and not is_taken and re.fullmatch(r"-?[0-9]{1,5}\.[0-9]{3,4}[1-9]", text):
                missing.append((bounds, text))
    assert not wrong and not missing, (wrong[:20], missing[:20])
    assert num_taken > 5_000


@pytest.mark.parametrize("bound", ["-7", "0", "2.5", "9007199254740991", "9007199254740992", "-9007199254740994"])
def test_integers_keep_their_bounds_where_floats_have_gaps(bound: str) -> None:
    for keyword in (*INCLUSIVE, *EXCLUSIVE):
        outputs = Outputs.of_schema(text_of("integer", {keyword: bound}))
        way = 1 if keyword.lower().endswith("minimum") else -1
        numbers = [int(Decimal(bound)) + distance for distance in range(-4, 5)]
        taken = [number for number in numbers if str(number) in outputs]
        assert all(within(str(number), {keyword: bound}) for number in taken), (keyword, taken)
        assert int(Decimal(bound)) + 4 * way in taken


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ('{"type":"number","minimum":0.1000000000000000000001,"maximum":1}', "0.2", "0.1"),
        ('{"type":"number","minimum":-772424488432468.2,"maximum":0}', "-772424488432467", "-772424488432468.20001"),
        ('{"type":"number","maximum":4611686018427387904}', "4611686018427387000", "4611686018427387905"),
        ('{"type":"number","minimum":4,"exclusiveMinimum":true,"maximum":4.5}', "4.1", "4"),
        ('{"type":"number","minimum":5,"exclusiveMinimum":4,"exclusiveMaximum":5.5}', "5", "4.5"),
        ('{"allOf":[{"type":"number","exclusiveMinimum":4},{"maximum":4.001}]}', "4.0005", "4"),
        ('{"anyOf":[{"type":"number","exclusiveMinimum":4,"exclusiveMaximum":4.001},{"type":"null"}]}', "null", "4"),
        ('{"$ref":"#/$defs/n","$defs":{"n":{"type":"number","minimum":-0.5,"exclusiveMaximum":0}}}', "-0.5", "-0"),
        ('{"type":"array","items":{"type":"number","exclusiveMinimum":4,"maximum":4.001}}', "[4.001]", "[4]"),
    ],
)
def test_bounds_hold_anywhere_in_a_schema(schema: str, taken: str, refused: str) -> None:
    outputs = Outputs.of_schema(schema)
    assert taken in outputs and refused not in outputs


SMALL = {"type": "number", "exclusiveMinimum": 4, "exclusiveMaximum": 4.001}


def test_bounds_hold_in_arguments_of_tools() -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"x": SMALL}, "required": ["x"]}}]
    form = CallForm(CallSyntax("<tool_call>", "</tool_call>"))
    outputs = Outputs(ConstraintAsk("tool_calls", json.dumps(tools), form=form))
    call = '<tool_call>\n{{"name": "f", "arguments": {{"x": {}}}}}\n</tool_call>'
    assert call.format("4.0005") in outputs and call.format("4") not in outputs


def test_bounds_hold_in_schemas_within_a_grammar() -> None:
    outputs = Outputs(
        ConstraintAsk("grammar", f'start: "%json {{" x // %json {{"x": 1}}\nx: %json {json.dumps(SMALL)}')
    )
    assert "%json {4.0005" in outputs and "%json {4" not in outputs


def test_schemas_without_bounds_are_unchanged() -> None:
    for text in (
        '{"minimum": 4, "maximum":4.5}',
        '{"exclusiveMinimum',
        "",
        '{"exclusiveMinimum": "4"}',
        '{"const": 12345678901}',
    ):
        assert exact_schema(text) == text
    for schema in (
        {"exclusiveMinimum": True},
        {"properties": {"exclusiveMinimum": {"type": "null"}}},
        {"maximum": 10**400},
    ):
        text = json.dumps(schema)
        assert json.loads(exact_schema(text)) == schema


def test_multiples_whose_product_overflows_are_refused() -> None:
    """The compiler would accept 65,536 as a multiple of both."""
    with pytest.raises(InvalidConstraint, match="multipleOf 1E-10 and 3 cannot be combined"):
        Outputs.of_schema({"type": "number", "allOf": [{"multipleOf": 3}, {"multipleOf": 1e-10}]})
    large, larger = {"type": "integer", "multipleOf": 65536}, {"type": "integer", "multipleOf": 65537}
    for schema in ({"allOf": [large, larger]}, {"$ref": "#/$defs/n", "multipleOf": 65537, "$defs": {"n": large}}):
        assert "multipleOf 65536 and 65537 cannot be combined" in problem_of(json.dumps(schema))
    assert not problem_of(json.dumps({"type": "object", "properties": {"x": large, "y": larger}}))
    assert not problem_of(json.dumps({"allOf": [large, {"multipleOf": 65535}]}))


def test_multiples_within_bounds() -> None:
    steps = {"integer": ("3", "1.5", "-7"), "number": ("0.5", "0.01", "3", "0.00025")}
    for kind, lower, upper in product(steps, ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        for step in steps[kind]:
            bounds = {lower: "-1.5", upper: "21"}
            outputs = Outputs.of_schema(text_of(kind, {**bounds, "multipleOf": step}))
            for text in texts_near(("-1.5", "21", "0", step)):
                if text in outputs:
                    assert within(text, bounds) and Decimal(text) % Decimal(step) == 0, (step, bounds, text)
            assert "0" in outputs and "1.0001" not in outputs


@pytest.mark.parametrize(
    "number",
    ["1e-999999999999", "0e-999999999999", "1e999999999999", "-0.0", "5e-324", "1.7976931348623157e308", "9" * 4_000]
    + ["0." + "1" * 9_000, "NaN", "-Infinity", "true", "null", '"4"', "[4]"],
)
def test_any_number_is_accepted_or_refused(number: str) -> None:
    for keyword in (*INCLUSIVE, *EXCLUSIVE, "const", "multipleOf"):
        schema = f'{{"allOf":[{{"type":"number","{keyword}":{number}}},{{"multipleOf":3}}]}}'
        with contextlib.suppress(InvalidConstraint):
            Outputs.of_schema(schema)
