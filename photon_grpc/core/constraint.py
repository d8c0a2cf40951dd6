"""The form of an output, as plain data, and the work that it may cause."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that a front end has written and tried out."""

    kind: Literal["json_schema", "regex", "lark", "protobuf", "tool_calls"]
    #: As llguidance reads it: a JSON object with one grammar in its list.
    grammar: str
    #: Of what it means: equal for grammars that differ in annotations and the order of keys only.
    digest: bytes = b""
    #: No output of the model that it is meant for has fewer.
    least_tokens: int = 0

    @property
    def field(self) -> str:
        """The request's field that asks for it."""
        return "chat.tool_choice" if self.kind == "tool_calls" else "structured_output"

    @property
    def limits(self) -> Mapping[str, Any]:
        """Arguments of llguidance's LLParserLimits. Front ends try a grammar out under the same limits under which the
        engine compiles and walks it."""
        return _LARK_LIMITS if self.kind == "lark" else _LIMITS


def told(words: str) -> str:
    """llguidance's words for a caller: without marks, and without the stack of a panic."""
    return words.replace("<non-verbose/>", "").partition("<backtrace>")[0].strip()


#: States that a lexer may learn for one output.
MAX_LEXER_STATES = 20_000
#: An optional property of a schema is four items of a row, and a lexer that meets a `uri` for the first time takes
#: 30,000 of its fuel, 2 ms.
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
#: Of a caller's own rules the parser may keep every reading: `start: start start | "a"` takes 1 ms a step at most.
_LARK_LIMITS: Mapping[str, Any] = MappingProxyType({**_LIMITS, "max_items_in_row": 250, "step_max_items": 1_000})
