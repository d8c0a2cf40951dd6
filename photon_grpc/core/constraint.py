"""What an output must look like, as plain data, and the work that it may cause."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that a front end has written and tried out."""

    #: As llguidance reads it: a JSON object with one grammar in its list.
    grammar: str


#: Arguments of llguidance's LLParserLimits. Front ends try grammars out under the same limits under which the engine
#: compiles and walks them.
LIMITS: Mapping[str, Any] = MappingProxyType(
    {
        "max_items_in_row": 500,
        "initial_lexer_fuel": 500_000,
        "step_lexer_fuel": 20_000,
        "step_max_items": 5_000,
        "max_lexer_states": 20_000,
        "max_grammar_size": 100_000,
        "verbose_errors": False,
    }
)
