"""The messages of typed outputs, added to responses that have everything else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from photon_grpc.errors import InternalFailure, frames_of
from photon_grpc.frontend.output.update import OutputDelta
from photon_grpc.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from photon_grpc.server.typed.message_type import MessageType

_LOG = logging.getLogger(__name__)

#: Longer JSON is parsed in a thread; this much takes about 5 ms.
_LONG_BYTES = 4096
#: As google.protobuf.Any spells the URL of a type.
_TYPE_URLS = "type.googleapis.com/"


async def add(outputs: Iterable[pb.Output], deltas: Iterable[OutputDelta], message_type: MessageType) -> None:
    """Add the message of every complete output. Raise InternalFailure if one does not parse, despite its grammar."""
    for output, delta in zip(outputs, deltas, strict=True):
        json = b"" if delta.finish is None else delta.finish.message_json
        if len(json) > _LONG_BYTES:
            await asyncio.to_thread(_add, output, json, message_type)
        elif json:
            _add(output, json, message_type)


def _add(output: pb.Output, json: bytes, message_type: MessageType) -> None:
    try:
        message = message_type.parse(json.decode())
        output.message.type_url = f"{_TYPE_URLS}{message.DESCRIPTOR.full_name}"
        output.message.value = message.SerializeToString()
    except Exception as error:
        # The error's text is left out, since it quotes the output.
        _LOG.error("a complete output is not a %s, %s\n%s", message_type.name, type(error).__name__, frames_of(error))
        raise InternalFailure("internal error: the output cannot be parsed as its message") from None
