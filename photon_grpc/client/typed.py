"""Typed generation: a message class in, messages of it out, whole or as they fill."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Generic

from google.protobuf.json_format import ParseError

from photon_grpc.client.generation import Generation
from photon_grpc.client.message_type import M, cut_off, parse_message
from photon_grpc.client.partial_json import PartialJson
from photon_grpc.client.stream import Stream


def message_of(result: Generation, message_type: type[M]) -> M:
    """Return the message of the first output. Raise MessageMismatch where it was cut off."""
    if not isinstance(result.message, message_type):
        raise cut_off(message_type.DESCRIPTOR.full_name, result.text, result.finish.reason)
    return result.message


async def growing_messages(stream: Stream, message_type: type[M]) -> AsyncGenerator[M, None]:
    """Return a message whenever more of it is known, the whole one last. Raise MessageMismatch where it was cut off."""
    growing = _Growing(message_type)
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


class _Growing(Generic[M]):
    """A message of which more and more is known."""

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
        """Return the message where it says more than before."""
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
        # One that says more is larger. One that says less has just begun a key of a map anew.
        before_bytes, self._num_bytes = self._num_bytes, message.ByteSize()
        return message if self._num_bytes > before_bytes else None

    def _is_worth_parsing(self) -> bool:
        """Return whether a value is complete that was not, or the text has grown by a fixed share: the whole of it is
        parsed, and of a long string that comes in small pieces that would take time by the square of its length."""
        is_complete = self._json.num_complete > self._num_complete
        return is_complete or self._num_chars - self._num_parsed > self._num_parsed * _GROWN_SHARE
