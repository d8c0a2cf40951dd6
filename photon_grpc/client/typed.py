"""Typed generation: a message class in, its messages out, whole or as they grow."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Generic

from google.protobuf.json_format import ParseError

from photon_grpc.client.generation import Generation
from photon_grpc.client.message_type import M, cut_off, parse_message
from photon_grpc.client.partial_json import PartialJson
from photon_grpc.client.stream import Stream


def message_of(result: Generation, message_type: type[M]) -> M:
    """Return the message of the first output. Raise MessageMismatch if it is cut off."""
    if not isinstance(result.message, message_type):
        raise cut_off(message_type.DESCRIPTOR.full_name, result.text, result.finish.reason)
    return result.message


async def growing_messages(stream: Stream, message_type: type[M]) -> AsyncGenerator[M, None]:
    """Yield a message whenever more of it is known, the whole one last. Raise MessageMismatch if it is cut off."""
    growing = _PartialMessage(message_type)
    async with stream:
        async for delta in stream:
            if delta.finish is not None:
                if not isinstance(delta.message, message_type):
                    text = growing.text + delta.text
                    raise cut_off(message_type.DESCRIPTOR.full_name, text, delta.finish.reason)
                yield delta.message
            elif (message := growing.add(delta.text)) is not None:
                yield message


_GROWN_SHARE = 1 / 16


class _PartialMessage(Generic[M]):
    """A message that grows as its JSON arrives."""

    def __init__(self, message_type: type[M]) -> None:
        self._type = message_type
        self._json = PartialJson(message_type)
        self._known = ""
        self._num_complete = self._num_chars = self._num_parsed = 0
        self._num_bytes = 0

    @property
    def text(self) -> str:
        return self._json.text

    def add(self, text: str) -> M | None:
        """Add text, and return the message if it holds more than before."""
        self._json.add(text)
        self._num_chars += len(text)
        if not self._is_worth_parsing():
            return None
        self._num_complete, self._num_parsed = self._json.num_complete, self._num_chars
        before, self._known = self._known, self._json.complete()
        if self._known == before:
            return None
        try:
            message = parse_message(self._known, self._type)
        except ParseError:
            # A required field may still be missing.
            return None
        # A message with more content is larger. It shrinks when a map's duplicate key begins again.
        before_bytes, self._num_bytes = self._num_bytes, message.ByteSize()
        return message if self._num_bytes > before_bytes else None

    def _is_worth_parsing(self) -> bool:
        """Return whether a value is complete or the text grew by a share; parsing always would be quadratic."""
        is_complete = self._json.num_complete > self._num_complete
        return is_complete or self._num_chars - self._num_parsed > self._num_parsed * _GROWN_SHARE
