"""A pattern's negated class excludes the escapes of its characters, too: outputs match the pattern in Python's `re`."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import pytest

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.json_schema import exact_schema
from photon_grpc.frontend.constraints.trial import byte_tokenizer, try_out

TEXTS = ('a"b', "a\\b", "a\nb", "ab", "-", "]", "a]", "^", "<", "'", "a-", "é", "\t")


def takes(schema: object, value: object) -> bool:
    constraint = try_out(ConstraintAsk("json_schema", json.dumps(schema)))
    matcher = llguidance.LLMatcher(byte_tokenizer(), constraint.grammar, log_level=0)
    output = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return matcher.try_consume_tokens(list(output)) == len(output) and matcher.is_accepting()


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"\\]+$',
        r'^[^<>"]+$',
        r"^[^'\"]*$",
        r"^[^\"\\\n]+$",
        r"^[^-a]+$",
        r"^[^\]a]+$",
        r"^[a\[^]+$",
        r"^[^^]+$",
        r"^[\^a]+$",
        r"^(?:[^\"]|<)+$",
    ],
)
def test_patterns_match_as_in_python(pattern: str) -> None:
    for text in TEXTS:
        wanted = re.search(pattern.replace("$", r"\Z"), text) is not None
        assert takes({"type": "string", "pattern": pattern}, text) == wanted, text


def test_patterns_of_names_and_of_schemas_within() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "patternProperties": {'^[^"]+$': {"type": "string", "pattern": "^[^\\\\]*$"}},
    }
    schema["additionalProperties"] = False
    assert takes(schema, {"a": 'x"'}) and not takes(schema, {'a"': "x"}) and not takes(schema, {"a": "\\"})


@pytest.mark.parametrize("pattern", ["(", "a/\n[b", '"a"(', "(?<=a)b"])
def test_an_error_quotes_the_callers_pattern_alone(pattern: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        try_out(ConstraintAsk("regex", pattern))
    assert caught.value.message.startswith("structured_output.regex: regex parse error:")
    assert "start:" not in caught.value.message and "^" in caught.value.message


def test_invalid_patterns_are_left_alone() -> None:
    kept = {"const": {"pattern": "[^a]"}, "enum": ["[^a]"], "description": "[^a]"}
    assert json.loads(exact_schema(json.dumps(kept))) == kept
    assert json.loads(exact_schema(json.dumps({"properties": {"pattern": {"pattern": "[^a]"}}}))) == {
        "properties": {"pattern": {"pattern": r"[^\x01a]"}}
    }
    for text in ("", '{"pattern": "[^a]', "true", '{"pattern": ["[^a]"]}'):
        assert exact_schema(text).replace(" ", "") == text.replace(" ", "")
