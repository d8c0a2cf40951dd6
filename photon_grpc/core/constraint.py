"""The constraint on the form of an output, as plain data, and the limits on the work that it may cause."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that a front end has written and tested."""

    kind: Literal["json_schema", "regex", "lark", "protobuf", "tool_calls"]
    #: In the format of llguidance: a JSON object with one grammar in its list.
    grammar: str
    #: Digest of the meaning: equal for grammars that differ only in annotations and the order of keys.
    digest: bytes = b""
    #: Lower bound on the tokens of an output of the model.
    least_tokens: int = 0

    @property
    def field(self) -> str:
        """The request field that sets it."""
        return "chat.tool_choice" if self.kind == "tool_calls" else "structured_output"

    @property
    def limits(self) -> Mapping[str, Any]:
        """Arguments of llguidance's LLParserLimits, the same when front ends test a grammar and the engine uses it."""
        return _LARK_LIMITS if self.kind == "lark" else _LIMITS


def readable_error(message: str) -> str:
    """Return an error message of llguidance without its marks and without the stack of a panic."""
    return message.replace("<non-verbose/>", "").partition("<backtrace>")[0].strip()


#: Most states that a lexer may learn for one output.
MAX_LEXER_STATES = 20_000
#: An optional property of a schema takes four items of a row. The first `uri` that a lexer meets takes 30,000 units of
#: its fuel, 2 ms.
_LIMITS: Mapping[str, Any] = MappingProxyType(
    {
        "max_items_in_row": 1_000,
        "initial_lexer_fuel": 500_000,
        "step_lexer_fuel": 50_000,
        "step_max_items": 5_000,
        "max_lexer_states": MAX_LEXER_STATES,
        "max_grammar_size": 100_000,
        "verbose_errors": False,
    }
)
#: In a caller's own rules the parser may keep every reading: `start: start start | "a"` takes up to 1 ms a step.
_LARK_LIMITS: Mapping[str, Any] = MappingProxyType({**_LIMITS, "max_items_in_row": 250, "step_max_items": 1_000})
