"""An output that is the JSON of a message: its bytes are kept, whatever of its text is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.output.output import OutputText

#: Ends of outputs that satisfy their constraint.
_COMPLETE = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.CONSTRAINT_COMPLETE})


class TypedOutput(OutputText):
    """Says its whole JSON with its finish, where it is complete.

    Args:
        token_bytes: the bytes of an id, as the grammar has seen them.
        options: of OutputText.
    """

    __slots__ = ("_all_ids", "_token_bytes")

    def __init__(self, index: int, *, token_bytes: Callable[[int], bytes], **options: Any) -> None:
        super().__init__(index, **options)
        self._token_bytes = token_bytes
        self._all_ids: list[int] = []

    def push(self, token_id: int) -> bool:
        self._all_ids.append(token_id)
        return super().push(token_id)

    def end(self, reason: FinishReason) -> None:
        super().end(reason)
        if self.finish is None or reason not in _COMPLETE:
            return
        # A token that ends an output is no part of what the constraint speaks of.
        ids = self._all_ids if reason is FinishReason.CONSTRAINT_COMPLETE else self._all_ids[:-1]
        self.finish = replace(self.finish, message_json=b"".join([self._token_bytes(each) for each in ids]))
