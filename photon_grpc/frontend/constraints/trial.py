"""Trials of constraints before the engine gets them: each is compiled for tokens that are bytes, and walked.

A hostile grammar may make the compiler run long or crash (a chain of ten thousand references exhausts its stack), so
`service/processes/encoder.py` runs the trial in a fork. The engine compiles constraints that pass, by the same limits
and with more stack and time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llguidance
import msgspec

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.constraint import Constraint, readable_error
from photon_grpc.errors import InvalidConstraint
from photon_grpc.frontend.constraints.constraint import field_of, write_grammar
from photon_grpc.frontend.constraints.digest import digest_of
from photon_grpc.frontend.constraints.json_schema import children, problem_of
from photon_grpc.frontend.constraints.lark_schemas import lark_schemas
from photon_grpc.frontend.constraints.tools import read_tools

#: Bytes of the walk, enough for a grammar that grows with every step to meet its limit.
_NUM_WALKED = 64
#: Characters of the compiler's message that are passed on.
_MAX_PROBLEM_CHARS = 600
#: Subschemas that are compiled alone to find the one that does not compile.
_MAX_SUBSCHEMAS = 64
#: Characters of the longest schema that is searched for it.
_MAX_SEARCHED_CHARS = 32 * 1024
#: A hint of the compiler to an option that callers do not have.
_ONE_OF = "Enable 'coerce_one_of' option"
#: What precedes the regex parser's own words.
_IN_REGEX = " (in regex): "


def try_out(ask: ConstraintAsk) -> Constraint:
    """Return the grammar of a checked `ask`. Raise InvalidConstraint if it does not compile or nothing satisfies it."""
    constraint = write_grammar(ask)
    matcher = _compile(constraint)
    problem = matcher.get_error()
    if problem:
        raise _refused(*_located(ask, problem))
    field, problem = _unwritable(ask)
    problem = problem or _walk(matcher)
    if problem:
        raise _refused(field, problem)
    return msgspec.structs.replace(constraint, digest=digest_of(ask))


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """Return the only tokenizer of bytes, made before the processes that use it are forked."""
    return llguidance.LLTokenizer("byte", slices=[])


def _compile(constraint: Constraint) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(**constraint.limits)
    return llguidance.LLMatcher(byte_tokenizer(), constraint.grammar, log_level=0, limits=limits)


def _walk(matcher: llguidance.LLMatcher) -> str:
    """Return why no output can follow the grammar for some steps, "" if one can. The walk is deterministic."""
    for step in range(_NUM_WALKED):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            problem = matcher.get_error()
            return "nothing satisfies it" if not step and "NoExtension" in problem else f"too complex: {_cut(problem)}"
        allowed = [id for id in range(256) if mask[id // 8] >> id % 8 & 1]
        if not allowed:
            return "" if step else "only an empty output satisfies it"
        matcher.try_consume_tokens([allowed[step * 7 % len(allowed)]])
        if matcher.is_stopped() and not matcher.is_error():
            return ""
    return ""


def _refused(field: str, problem: str) -> InvalidConstraint:
    return InvalidConstraint(f"{field}: {problem}", field=field)


def _unwritable(ask: ConstraintAsk) -> tuple[str, str]:
    """Return a field, and why the library would write something else than it allows, "" if it would not."""
    field = field_of(ask)
    if ask.kind == "json_schema":
        return field, problem_of(ask.text)
    if ask.kind == "grammar":
        return field, next(filter(None, map(problem_of, lark_schemas(ask.text))), "")
    if ask.kind == "tool_calls":
        for tool in read_tools(ask):
            problem = problem_of(msgspec.json.encode(tool.schema).decode())
            if problem:
                return tool.field, f"the parameters of the {tool.label}: {problem}"
    return field, ""


def _located(ask: ConstraintAsk, problem: str) -> tuple[str, str]:
    """Return the field, and the compiler's message with the part of the constraint that it is about."""
    field = field_of(ask)
    if ask.kind == "json_schema":
        where = _pointer(ask.text, problem)
        return field, f"at {where}: {_cut(problem)}" if where else _cut(problem)
    if ask.kind == "tool_calls":
        for tool in read_tools(ask):
            alone = ConstraintAsk("json_schema", msgspec.json.encode(tool.schema).decode())
            its_problem = _compile(write_grammar(alone)).get_error()
            if its_problem:
                _, words = _located(alone, its_problem)
                return tool.field, f"the parameters of the {tool.label}: {words}"
    return field, _cut(_without_wrapper(problem) if ask.kind == "regex" else problem)


def _without_wrapper(problem: str) -> str:
    """Return a message about a regular expression without the rule that holds it, and without its place in that."""
    inner = problem.partition(_IN_REGEX)[2] or problem
    return inner.rpartition("\n   1 | start: /")[0] or inner


def _cut(problem: str) -> str:
    problem = readable_error(problem)
    if _ONE_OF in problem:
        problem = (
            "the schemas of a oneOf must visibly exclude each other: by type, or by the value of a required property"
        )
    return problem if len(problem) <= _MAX_PROBLEM_CHARS else f"{problem[:_MAX_PROBLEM_CHARS]} ..."


def _pointer(schema: str, problem: str) -> str:
    """Return the JSON pointer of the deepest subschema that alone has the same problem, "" for the whole schema."""
    if len(schema) > _MAX_SEARCHED_CHARS:
        return ""
    try:
        root = msgspec.json.decode(schema)
    except (msgspec.MsgspecError, RecursionError):  # for example a number that no float holds
        return ""
    if not isinstance(root, dict):
        return ""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    pointer, num_left = "", _MAX_SUBSCHEMAS
    node: Any = root
    while True:
        for step, child in [(step, child) for step, child in children(node) if isinstance(child, dict | bool)]:
            num_left -= 1
            if num_left < 0:
                return pointer
            alone = msgspec.json.encode({**child, **shared}).decode() if isinstance(child, dict) else str(child).lower()
            if _compile(write_grammar(ConstraintAsk("json_schema", alone))).get_error() == problem:
                pointer, node = pointer + step, child
                break
        else:
            return pointer
