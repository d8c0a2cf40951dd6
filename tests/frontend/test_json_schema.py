"""The defects of llguidance with schemas still exist, and our compensation for each is right."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import llguidance
import pytest

from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.json_schema import (
    REFUSALS,
    REWRITES,
    children,
    exact_schema,
    problem_of,
    schemas_of,
)
from photon_grpc.frontend.constraints.trial import byte_tokenizer
from tests.frontend.outputs import Outputs

#: By the name of a compensation, schemas and invalid texts that the library accepts.
TAKEN = {
    "bounds": (
        ('{"type":"number","exclusiveMinimum":4,"exclusiveMaximum":4.001}', "4"),
        ('{"type":"number","minimum":-0.5,"exclusiveMaximum":0}', "-0"),
        ('{"type":"integer","exclusiveMinimum":9007199254740992}', "9007199254740992"),
        ('{"type":"number","minimum":-772424488432468.2,"maximum":0}', "-772424488432468.20001"),
    ),
    "classes": (
        (r'{"type":"string","pattern":"^[^\"]+$"}', r'"a\"b"'),
        (r'{"type":"string","pattern":"^[^\\\\]+$"}', r'"a\\b"'),
    ),
    "formats": (
        ('{"type":"string","format":"date"}', '"2023-02-29"'),
        ('{"type":"string","format":"date"}', '"0000-01-01"'),
        ('{"type":"string","format":"time"}', '"12:00:60Z"'),
        ('{"type":"string","format":"date-time"}', '"2024-01-01t12:00:00z"'),
    ),
    "control characters": (
        (r'{"const":"a\u0001"}', '"a"'),
        (r'{"type":"string","pattern":"^a\\x01$"}', '"a"'),
    ),
    "constants": (
        ('{"const":9007199254740993}', "9007199254740992"),
        ('{"const":9163.453718085519}', "9163.45371808552"),
    ),
    "multipleOf": (('{"type":"integer","allOf":[{"multipleOf":65536},{"multipleOf":65537}]}', "65536"),),
}
#: Schemas that the library refuses, and valid texts.
REFUSED = {
    "oneOf": (
        (
            '{"oneOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}],"$defs":{"a":{"type":"null"},"b":{"type":"number"}}}',
            "1",
        ),
    )
}


def flat(cases: dict[str, tuple[tuple[str, str], ...]]) -> list[tuple[str, str, str]]:
    return [(name, schema, text) for name, pairs in cases.items() for schema, text in pairs]


def raw(schema: str) -> llguidance.LLMatcher:
    """Return the library's matcher without compensations, with our escapes."""
    options = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf"\\'}
    written = f'{schema[:-1]},"x-guidance":{json.dumps(options)}}}'
    return llguidance.LLMatcher(byte_tokenizer(), f'{{"grammars":[{{"json_schema":{written}}}]}}', log_level=0)


def takes(matcher: llguidance.LLMatcher, text: str) -> bool:
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


def healed(name: str) -> str:
    return f"llguidance {version('llguidance')} has {name!r} right: set its fixed_in, or remove it"


@pytest.mark.parametrize(("name", "schema", "text"), flat(TAKEN))
def test_the_library_accepts_invalid_values_that_we_refuse(name: str, schema: str, text: str) -> None:
    assert takes(raw(schema), text), healed(name)
    try:
        assert text not in Outputs.of_schema(schema)
    except InvalidConstraint:
        assert name in {each.name for each in REFUSALS}


@pytest.mark.parametrize(("name", "schema", "text"), flat(REFUSED))
def test_the_library_refuses_values_that_we_accept(name: str, schema: str, text: str) -> None:
    assert raw(schema).is_error(), healed(name)
    assert text in Outputs.of_schema(schema)


def test_every_workaround_for_the_library_is_still_needed() -> None:
    table = [*REWRITES, *REFUSALS]
    assert {each.name for each in table} == {*TAKEN, *REFUSED}
    assert all(each.defect and each.upstream and each.fixed_in for each in table)


@pytest.mark.parametrize(("name", "schema", "text"), [*flat(TAKEN), *flat(REFUSED)])
def test_a_schema_whose_letters_are_escaped_is_the_same(name: str, schema: str, text: str) -> None:
    """Keywords may be spelled with \\u."""
    escaped = re.sub(r"\\u....|\\.|([a-zA-Z])", lambda at: f"\\u{ord(at[1]):04x}" if at[1] else at[0], schema)
    assert json.loads(escaped) == json.loads(schema)
    assert bool(problem_of(escaped)) == bool(problem_of(schema)) == (name in {each.name for each in REFUSALS})
    assert (exact_schema(escaped) != escaped) == (exact_schema(schema) != schema)


def test_children_are_named_by_their_pointers() -> None:
    schema = {
        "properties": {"a/b": {"type": "string"}, "const": {"items": {"$ref": "#/$defs/x~y"}}},
        "anyOf": [{"const": {"items": {}}}, True],
        "additionalProperties": False,
        "default": {"properties": {}},
        "$defs": {"x~y": {}},
    }
    assert [step for step, _ in children(schema)] == [
        *("/properties/a~1b", "/properties/const", "/anyOf/0", "/anyOf/1", "/additionalProperties", "/$defs/x~0y")
    ]
    assert len(list(schemas_of(schema))) == 6
    assert list(schemas_of(True)) == []
