"""Tries a constraint out before the engine is given it: compiles it for tokens that are bytes, and walks it.

Hostile grammars make a compiler run for long or crash (a chain of ten thousand references exhausts its stack), so
`service/processes/encoder.py` runs the trial in a fork. The engine compiles what passes, by the same limits and with
more stack and time than here.
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

#: Bytes of the walk: enough for what grows with every step to meet its limit.
_NUM_WALKED = 64
#: Characters of the compiler's words that are told.
_MAX_WORDS = 600
#: Subschemas of a schema that does not compile which are compiled alone, to find which it is.
_MAX_LOOKED_AT = 64
_MAX_LOOKED_INTO = 32 * 1024
#: In words of an option that no caller has.
_ONE_OF = "Enable 'coerce_one_of' option"


def try_out(ask: ConstraintAsk) -> Constraint:
    """Return the grammar of a checked `ask`, which compiles and which something satisfies. Raise InvalidConstraint."""
    field = field_of(ask)
    constraint = write_grammar(ask)
    matcher = _compile(constraint)
    problem = matcher.get_error()
    if problem:
        raise InvalidConstraint(f"{field}: {_told(ask, problem)}", field=field)
    problem = _unwritable(ask) or _walk(matcher)
    if problem:
        raise InvalidConstraint(f"{field}: {problem}", field=field)
    return msgspec.structs.replace(constraint, digest=digest_of(ask))


@cache
def byte_tokenizer() -> llguidance.LLTokenizer:
    """Made once, before processes are forked that use it."""
    return llguidance.LLTokenizer("byte", slices=[])


def _compile(constraint: Constraint) -> llguidance.LLMatcher:
    limits = llguidance.LLParserLimits(**constraint.limits)
    return llguidance.LLMatcher(byte_tokenizer(), constraint.grammar, log_level=0, limits=limits)


def _walk(matcher: llguidance.LLMatcher) -> str:
    """Return the reason that it cannot be followed for some steps; empty where it can. The way is the same for the
    same grammar."""
    for step in range(_NUM_WALKED):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            words = matcher.get_error()
            return "nothing satisfies it" if not step and "NoExtension" in words else f"too complex: {_cut(words)}"
        allowed = [id for id in range(256) if mask[id // 8] >> id % 8 & 1]
        if not allowed:
            return "" if step else "only an empty output satisfies it"
        matcher.try_consume_tokens([allowed[step * 7 % len(allowed)]])
        if matcher.is_stopped() and not matcher.is_error():
            return ""
    return ""


def _unwritable(ask: ConstraintAsk) -> str:
    """Return the reason that the library would write something else; empty where it would not."""
    if ask.kind == "json_schema":
        return problem_of(ask.text)
    if ask.kind == "grammar":
        return next(filter(None, map(problem_of, lark_schemas(ask.text))), "")
    if ask.kind == "tool_calls":
        for tool in read_tools(ask.text, *ask.choices):
            problem = problem_of(msgspec.json.encode(tool.schema).decode())
            if problem:
                return f"the parameters of the {tool.label}: {problem}"
    return ""


def _told(ask: ConstraintAsk, problem: str) -> str:
    """Return the compiler's words, and of which part they are."""
    if ask.kind == "json_schema":
        where = _pointer(ask.text, problem)
        return f"at {where}: {_cut(problem)}" if where else _cut(problem)
    if ask.kind == "tool_calls":
        for tool in read_tools(ask.text, *ask.choices):
            alone = ConstraintAsk("json_schema", msgspec.json.encode(tool.schema).decode())
            its_problem = _compile(write_grammar(alone)).get_error()
            if its_problem:
                return f"the parameters of the {tool.label}: {_told(alone, its_problem)}"
    return _cut(problem)


def _cut(words: str) -> str:
    words = readable_error(words)
    if _ONE_OF in words:
        words = (
            "the schemas of a oneOf must visibly exclude each other: by type, or by the value of a required property"
        )
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]} ..."


def _pointer(schema: str, problem: str) -> str:
    """Return the JSON pointer of the deepest subschema that alone has the same problem; empty for the whole."""
    if len(schema) > _MAX_LOOKED_INTO:
        return ""
    try:
        root = msgspec.json.decode(schema)
    except (msgspec.MsgspecError, RecursionError):  # a number that no float holds, say
        return ""
    if not isinstance(root, dict):
        return ""
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    pointer, left = "", _MAX_LOOKED_AT
    node: Any = root
    while True:
        for step, child in [(step, child) for step, child in children(node) if isinstance(child, dict | bool)]:
            left -= 1
            if left < 0:
                return pointer
            alone = msgspec.json.encode({**child, **shared}).decode() if isinstance(child, dict) else str(child).lower()
            if _compile(write_grammar(ConstraintAsk("json_schema", alone))).get_error() == problem:
                pointer, node = pointer + step, child
                break
        else:
            return pointer
