"""Outputs that are the JSON of a message, whose bytes are kept even if their text is not asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.output.output import OutputText

#: The finish reasons of outputs that satisfy their constraint.
COMPLETE = frozenset({FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.CONSTRAINT_COMPLETE})


class TypedOutput(OutputText):
    """An output whose finish has its whole JSON, if it is complete.

    Args:
        token_bytes: returns the bytes of an id as the grammar reads them.
        options: those of OutputText.
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
        if self.finish is None or reason not in COMPLETE:
            return
        # The token that ends an output is not part of the JSON.
        ids = self._all_ids if reason is FinishReason.CONSTRAINT_COMPLETE else self._all_ids[:-1]
        self.finish = replace(self.finish, message_json=b"".join([self._token_bytes(each) for each in ids]))
