"""Typed generation: a message class in, messages of it out, whole or as they fill."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from google.protobuf.json_format import ParseError
from google.protobuf.message import Message

from photon_grpc.client.generation import Generation
from photon_grpc.client.message_type import M, MessageMismatch, parse_message
from photon_grpc.client.partial_json import PartialJson
from photon_grpc.client.stream import Stream


def message_of(result: Generation, message_type: type[M]) -> M:
    """The message of the first output. Raise MessageMismatch where it was cut off."""
    if not isinstance(result.message, message_type):
        raise _incomplete(message_type, result.finish.reason)
    return result.message


async def growing_messages(stream: Stream, message_type: type[M]) -> AsyncGenerator[M, None]:
    """A message whenever more of it is complete, the whole one last. Raise MessageMismatch where it was cut off."""
    partial = PartialJson()
    async with stream:
        async for delta in stream:
            if delta.finish is not None:
                if not isinstance(delta.message, message_type):
                    raise _incomplete(message_type, delta.finish.reason)
                yield delta.message
            elif partial.add(delta.text):
                # A required field may still be missing.
                with contextlib.suppress(ParseError):
                    yield parse_message(partial.complete(), message_type)


def _incomplete(message_type: type[Message], reason: str) -> MessageMismatch:
    return MessageMismatch(f"the output ended by {reason} before its {message_type.DESCRIPTOR.full_name} was whole")
