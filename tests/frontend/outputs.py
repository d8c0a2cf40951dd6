"""The outputs that a constraint allows, by the engine's matcher for tokens that are bytes."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.frontend.constraints.trial import byte_tokenizer, try_out


class Outputs:
    def __init__(self, ask: ConstraintAsk) -> None:
        """Raise InvalidConstraint."""
        self._matcher = llguidance.LLMatcher(byte_tokenizer(), try_out(ask).grammar, log_level=0)

    @classmethod
    def of_schema(cls, schema: Any) -> Outputs:
        return cls(ConstraintAsk("json_schema", schema if isinstance(schema, str) else json.dumps(schema)))

    def __contains__(self, text: str) -> bool:
        self._matcher.reset()
        output = list(text.encode())
        return self._matcher.try_consume_tokens(output) == len(output) and self._matcher.is_accepting()
