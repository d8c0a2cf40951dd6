"""What docs/api.md says of schemas and expressions is what the compiler does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.trial import try_out

GUIDE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
#: An argument that the keyword takes, and what must stand beside it to mean anything.
ARGUMENTS = {
    "type": "string",
    "enum": ["a"],
    "const": "a",
    "anyOf": [{"type": "string"}],
    "allOf": [{"type": "string"}],
    "oneOf": [{"type": "string"}, {"type": "null"}],
    "$ref": "#/$defs/a",
    "properties": {"a": {}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^x": {}},
    "items": {},
    "prefixItems": [{}],
    "additionalItems": {},
    "pattern": "^a$",
    "format": "date",
    "multipleOf": 3,
    "not": {"type": "string"},
    "uniqueItems": True,
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "$dynamicRef": "#a",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/a",
    "$defs": {},
    "definitions": {},
    **{key: {"type": "string"} for key in ("if", "then", "else", "contains", "propertyNames")},
}


def listed(beginning: str) -> list[str]:
    """The names of the item that begins so."""
    item = GUIDE.split(f"\n* {beginning}", 1)[1].split("\n* ")[0].split("\n\n")[0]
    return re.findall(r"`([$a-zA-Z0-9-]+)`", item)


def compile(schema: object) -> None:
    try_out(ConstraintAsk("json_schema", json.dumps(schema)))


def schema_with(keyword: str) -> dict[str, object]:
    return {"$defs": {"a": {"type": "string"}}, keyword: ARGUMENTS.get(keyword, 1)}


@pytest.mark.parametrize("keyword", listed("constrain:"))
def test_documented_keywords_are_accepted(keyword: str) -> None:
    compile(schema_with(keyword))


@pytest.mark.parametrize("keyword", listed("refused:"))
def test_keywords_that_are_refused_are_named(keyword: str) -> None:
    with pytest.raises(InvalidConstraint, match=re.escape(f'"{keyword}"')):
        compile({"properties": {"p": schema_with(keyword)}})


def test_formats_and_annotations_are_those_listed() -> None:
    for name in listed("`format`:"):
        compile({"type": "string", "format": name})
    with pytest.raises(InvalidConstraint, match="Unknown format"):
        compile({"type": "string", "format": "iri"})
    for name in listed("no effect"):
        compile({name: ARGUMENTS.get(name, "x"), "type": "string"})
    compile({"anything": "else"})


@pytest.mark.parametrize("regex", [r"[^a-c]\d\w\s", r"\p{Lu}+?", "(a|b){2,3}", "(?P<x>a)b*", "(?i)a", "(?s).", "^a$"])
def test_the_documented_syntax_of_expressions_is_accepted(regex: str) -> None:
    try_out(ConstraintAsk("regex", regex))


@pytest.mark.parametrize("regex", ["(?=a)a", "(?!b)a", "(?<=a)b", r"(a)\1", r"a\b"])
def test_an_invalid_regular_expression_is_refused(regex: str) -> None:
    with pytest.raises(InvalidConstraint):
        try_out(ConstraintAsk("regex", regex))


def test_the_documented_syntax_of_grammars_is_accepted() -> None:
    schema = '%json {"type": "integer"}'
    rules = f'start: "x" INT pair{{1,2}} NAME? | {schema}\npair: "a" "b"*\nNAME: /[a-z]+/'
    lark = f"%ignore /[ ]+/\n%import common.INT\n{rules}"
    try_out(ConstraintAsk("grammar", lark))
    try_out(ConstraintAsk("grammar", 'root ::= "a" rest\nrest ::= [a-z]+ | "(" root ")"\n'))
    with pytest.raises(InvalidConstraint, match="tokens cannot be named"):
        try_out(ConstraintAsk("grammar", "start: <|eos|>"))
