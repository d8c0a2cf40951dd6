"""Constraints that a caller may set, checked and written as one grammar for llguidance."""

from __future__ import annotations

import re

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.json_fault import json_fault
from photon_grpc.errors import InvalidConstraint, InvalidRequest
from photon_grpc.frontend.constraints.json_schema import exact_schema
from photon_grpc.frontend.constraints.lark_schemas import TEXT, with_schemas
from photon_grpc.frontend.constraints.tools import read_tools, write_calls

#: The feature of a model that each kind needs.
FEATURES = {
    "json_schema": "JSON_SCHEMA",
    "json_object": "JSON_SCHEMA",
    "regex": "REGEX",
    "choices": "CHOICES",
    "grammar": "GRAMMAR",
    "protobuf": "PROTOBUF",
}
#: JSON without white space outside strings. Every string has one spelling: \u would add others, by which outputs could
#: write keys past the schema that declares them.
_JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf"\\',
}
#: JSON as Python's json.dumps writes it, as do the templates from which models learn to write calls.
_CALL_OPTIONS = {**_JSON_OPTIONS, "item_separator": ", ", "key_separator": ": "}
_SCHEMA, _GRAMMAR = "structured_output.json_schema", "structured_output.grammar"
_REGEX_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$]")
#: A token in Lark, referred to by its name or by ids.
_TOKEN = re.compile(r"<[^<>\s]+>")
_TEXT_OR_TOKEN = re.compile(rf"{TEXT}|({_TOKEN.pattern})")
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def field_of(ask: ConstraintAsk) -> str:
    return ask.tools_field if ask.kind == "tool_calls" else f"structured_output.{ask.kind}"


def check_constraint(ask: ConstraintAsk, max_bytes: int) -> None:
    """Raise InvalidConstraint if a constraint is too large, InvalidRequest if it is empty or not Unicode."""
    field = field_of(ask)
    if ask.kind == "choices" and not ask.choices:
        raise InvalidRequest(f"{field}.values: must not be empty", field=f"{field}.values")
    for i, choice in enumerate(ask.choices):
        if not choice:
            raise InvalidRequest(f"{field}.values[{i}]: must not be empty", field=f"{field}.values[{i}]")
    if ask.kind not in ("choices", "json_object") and not ask.text:
        raise InvalidRequest(f"{field}: must not be empty", field=field)
    try:
        num_bytes = sum([len(text.encode()) for text in (ask.text, *ask.choices)])
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field}: holds a lone surrogate, which is not Unicode", field=field) from None
    if num_bytes > max_bytes:
        message = f"{field}: has {num_bytes} bytes; {max_bytes} are allowed"
        raise InvalidConstraint(message, field=field, needed=num_bytes, limit=max_bytes)


def write_grammar(ask: ConstraintAsk) -> Constraint:
    """Return the grammar of a checked `ask`, which takes long for a long one. Raise InvalidConstraint."""
    if ask.kind in ("json_schema", "json_object"):
        schema = _compact(exact_schema(ask.text) or '{"type":"object"}')
        return Constraint("json_schema", _grammar("json_schema", schema))
    if ask.kind == "regex":
        return Constraint("regex", llguidance.LLMatcher.grammar_from_regex(ask.text))
    if ask.kind == "choices":
        patterns = [_REGEX_SIGNS.sub(r"\\\g<0>", choice) for choice in ask.choices]
        return Constraint("regex", llguidance.LLMatcher.grammar_from_regex("|".join(patterns)))
    if ask.form is not None:
        calls = write_calls(read_tools(ask), ask.form, _CALL_OPTIONS, is_one=bool(ask.choices))
        return Constraint("tool_calls", _grammar("lark_grammar", msgspec.json.encode(calls)))
    if ask.kind == "protobuf":
        return Constraint("protobuf", _grammar("lark_grammar", msgspec.json.encode(ask.text)))
    grammar = with_schemas(_checked(_lark(ask.text)), exact_schema)
    return Constraint("lark", _grammar("lark_grammar", msgspec.json.encode(grammar)))


def _grammar(kind: str, json: bytes) -> str:
    return msgspec.json.encode({"grammars": [{kind: msgspec.Raw(json)}]}).decode()


def _compact(schema: str) -> bytes:
    """Return the schema with our options instead of its own."""
    try:
        keywords = msgspec.json.decode(schema, type=dict[str, msgspec.Raw] | bool)
    except msgspec.ValidationError:
        raise InvalidConstraint(f"{_SCHEMA}: must be a JSON object, true or false", field=_SCHEMA) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidConstraint(f"{_SCHEMA}: is not JSON: {json_fault(error)}", field=_SCHEMA) from None
    if isinstance(keywords, bool):
        # `true` is the empty schema, and an empty enum allows nothing.
        return msgspec.json.encode({"x-guidance": _JSON_OPTIONS, **({} if keywords else {"enum": []})})
    return msgspec.json.encode({**keywords, "x-guidance": _JSON_OPTIONS})


def _lark(grammar: str) -> str:
    if not _EBNF_RULE.search(grammar):
        return grammar
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter may raise anything
        raise InvalidConstraint(f"{_GRAMMAR}: cannot be read as EBNF: {str(error)[:500]}", field=_GRAMMAR) from None


def _checked(grammar: str) -> str:
    """Return the grammar. Raise InvalidConstraint if a rule refers to a token, which would not be text."""
    # A search for any token is fast, and most grammars have none.
    for found in _TEXT_OR_TOKEN.finditer(grammar) if _TOKEN.search(grammar) else ():
        if found[1]:
            line = grammar.count("\n", 0, found.start()) + 1
            text = f"{_GRAMMAR}: line {line}: tokens cannot be named: {found[1][:100]}"
            raise InvalidConstraint(text, field=_GRAMMAR)
    return grammar
