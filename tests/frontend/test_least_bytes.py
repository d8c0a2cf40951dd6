"""No output that satisfies a constraint has fewer bytes than its bound.

The bound is compared with the shortest output that the matcher allows, found by trying all.
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.call_form import CallForm, CallSyntax
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.least_bytes import least_bytes
from photon_grpc.frontend.constraints.least_chars import least_chars
from photon_grpc.frontend.encoder_jobs import Grammar, TryConstraint, perform
from tests.examples import examples
from tests.frontend.fake_engine import served
from tests.frontend.outputs import Outputs


def schema_ask(schema: Any) -> ConstraintAsk:
    return ConstraintAsk("json_schema", json.dumps(schema))


ATOMS = (None, True, 1, 10, "", "ab", "cc", "abc", "é\n", [1, {"k": True}])
LISTS = ([], *([each] * num for each in (*ATOMS, []) for num in (1, 2, 3)))
FLAT = (*ATOMS, *LISTS)
PAIRS = tuple({"a": one, "bc": two} for one in ATOMS for two in ATOMS)
SMALL = (*FLAT, *({"a": each} for each in FLAT), *PAIRS)
VALUES = (*SMALL, {}, *({"bc": each} for each in SMALL), *([each] for each in SMALL), *([each, each] for each in SMALL))
TEXTS = {json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in VALUES}


LEAVES = st.sampled_from(
    [
        *({"type": kind} for kind in ("null", "boolean", "integer", "string", "array", "object")),
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "string", "pattern": "^(ab|c{2,3})+$"},
        {"const": "é\n"},
        {"enum": ["abc", None, [1, {"k": True}]]},
        {"type": ["null", "array"], "minItems": 3, "items": {"type": "boolean"}},
        {"type": "integer", "minimum": 10},
        True,
        {},
    ]
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(["a", "bc"]), unique=True)
    return st.one_of(
        st.builds(lambda items, num: {"type": "array", "items": items, "minItems": num}, inner, st.integers(0, 2)),
        st.builds(
            lambda one, other, required: {
                "type": "object",
                "properties": {"a": one, "bc": other},
                "required": required,
                "additionalProperties": False,
            },
            inner,
            inner,
            names,
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda one: {"$ref": "#/$defs/x~1y", "$defs": {"x/y": one}}, LEAVES),
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.recursive(LEAVES, composed, max_leaves=4))
def test_no_output_of_a_schema_is_shorter_than_the_bound(schema: Any) -> None:
    ask = schema_ask(schema)
    try:
        outputs = Outputs(ask)
    except InvalidConstraint:
        return
    least = least_bytes(ask)
    shorter = [text for text in TEXTS if len(text.encode()) < least and text in outputs]
    assert not shorter, (least, shorter[:5])


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        ({"type": "array", "minItems": 3, "items": {"type": "boolean"}}, [True, True, True]),
        ({"type": "object", "required": ["a", "bc"], "properties": {"a": {"const": "xyz"}}}, {"a": "xyz", "bc": 1}),
        ({"type": "object", "minProperties": 2}, {"a": 1, "": 2}),
        ({"type": "string", "minLength": 4}, "abcd"),
        ({"type": "string", "format": "uuid"}, "0" * 36),
        ({"anyOf": [{"type": "null"}, {"const": "abcdef"}]}, None),
        ({"allOf": [{"type": "string", "minLength": 3}, {"type": "string"}]}, "abc"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}}, [1]),
        ({"type": ["array", "string"], "minItems": 900, "minLength": 500}, "a" * 500),
    ],
)
def test_bounds_are_close_to_the_shortest_output(schema: Any, output: Any) -> None:
    length = len(json.dumps(output, separators=(",", ":")))
    assert length - 2 <= least_bytes(schema_ask(schema)) <= length


PATTERNS: dict[str, str] = {
    "abc": "abc",
    "a|bc": "a",
    "(ab|c{2,3})+": "ab",
    "(?:x{3}){2,}y?": "xxxxxx",
    "^a*$": "",
    "[a[b-c]]{2}": "ab",
    "[]a]x": "ax",
    r"[^\]]{3}": "abc",
    r"\p{Lu}\pL\x41\u{42}": "AAAB",
    r"\d{2}-\d{2}|\w+": "a",
    "(?i)ab(?-i:c)": "abc",
    "(?P<n>a)(?<m>b)": "ab",
    "a+?b*?c??": "a",
    r"\.\\\[": ".\\[",
    "é{2}": "éé",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_bounds_of_regular_expressions(pattern: str) -> None:
    least = least_chars(pattern)
    assert least == len(PATTERNS[pattern])
    assert PATTERNS[pattern] == "" or PATTERNS[pattern] in Outputs(ConstraintAsk("regex", pattern))


@pytest.mark.parametrize("pattern", ["(?x) a b", "a{", "(a", r"\b{start}a", "a" * 5_000, "[a", "a)b", "(" * 2_000, ""])
def test_regular_expressions_with_special_constructs(pattern: str) -> None:
    assert least_chars(pattern) == 0


@settings(max_examples=examples(60), deadline=None)
@given(
    st.recursive(
        st.sampled_from(["a", "[bc]", r"\d", "."]),
        lambda inner: st.one_of(
            st.builds(lambda one, other: f"{one}{other}", inner, inner),
            st.builds(lambda one, other: f"(?:{one}|{other})", inner, inner),
            st.builds(
                lambda one, often: f"(?:{one}){often}", inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{3,}"])
            ),
        ),
        max_leaves=6,
    )
)
def test_the_shortest_match_of_an_expression_has_the_computed_length(pattern: str) -> None:
    least, compiled = least_chars(pattern), re.compile(pattern)
    for num in range(min(least, 5) + 1):
        matches = any(compiled.fullmatch("".join(text)) for text in product("ab1", repeat=num))
        assert matches == (num == least)


def test_bounds_of_other_constraints() -> None:
    assert least_bytes(ConstraintAsk("choices", choices=("éé", "abcde"))) == 4
    assert least_bytes(ConstraintAsk("json_object")) == 2
    assert least_bytes(ConstraintAsk("grammar", 'start: "abc"')) == 0
    tools = [{"name": "find", "parameters": {"required": ["x"], "properties": {"x": {"const": "a" * 90}}}}]
    form = CallForm(CallSyntax("<tool_call>", "</tool_call>"))
    least = least_bytes(ConstraintAsk("tool_calls", json.dumps(tools), form=form))
    assert 100 <= least <= len('<tool_call>\n{"name": "find", "arguments": {"x": ""}}\n</tool_call>') + 90


def test_a_trial_returns_the_fewest_tokens_for_the_model() -> None:
    model = served()
    assert model.tokenizer is not None
    answer = perform(TryConstraint(schema_ask({"type": "string", "minLength": 1_000})), model)
    assert isinstance(answer, Grammar)
    assert answer.constraint.least_tokens == -(-1_002 // model.tokenizer.max_token_bytes)
    none = perform(TryConstraint(ConstraintAsk("grammar", 'start: "abc"')), model)
    assert isinstance(none, Grammar) and none.constraint.least_tokens == 0


def test_large_and_deep_schemas_are_not_read() -> None:
    deep: Any = {"type": "string", "minLength": 100}
    for _ in range(300):
        deep = {"type": "array", "items": deep, "minItems": 1}
    assert 0 < least_bytes(schema_ask(deep)) <= 702
    assert least_bytes(schema_ask({"enum": ["a" * 50] * 5_000})) == 0
    assert least_bytes(schema_ask({"$id": "x", "$ref": "#/$defs/n", "$defs": {"n": {"const": "abc"}}})) == 1
