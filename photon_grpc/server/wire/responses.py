"""The StreamGenerateResponses of a stream, in order: perhaps heartbeats, then those with tokens.

Nearly every one holds only new text, ids and scores. Those are written by hand in wire form, since messages would cost
several times as much. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from photon_grpc.core.generation import Start
from photon_grpc.frontend.output.answer import NO_ANSWER
from photon_grpc.frontend.output.logprobs import NO_TOKEN_LOGPROBS
from photon_grpc.frontend.output.update import OutputDelta, Update
from photon_grpc.server.wire import codec, logprobs, messages
from photon_grpc.server.wire.varint import varint
from photon_grpc.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from photon_grpc.server.typed.message_type import MessageType

#: Tags: the field's number and its wire type, 0 for a varint, 2 for length-prefixed data.
_DELTAS, _SEQUENCE = b"\x12", b"\x28"  # StreamGenerateResponse
_INDEX, _TEXT, _TOKEN_IDS = b"\x08", b"\x12", b"\x1a"  # Output


class ResponseWriter:
    """Writer of the responses of one stream."""

    __slots__ = ("has_begun", "message_type", "sequence")

    def __init__(self, message_type: MessageType | None = None) -> None:
        #: Number of the last response.
        self.sequence = 0
        #: The response with `start` was made.
        self.has_begun = False
        #: Set for typed output.
        self.message_type = message_type

    def plain(self, update: Update) -> bytes | None:
        """Return the next response in wire form; None if `full` must make it: the first, rich and long ones."""
        if update.usage is not None or not self.has_begun:
            return None
        deltas, num_ids = b"", 0
        for delta in update.deltas:
            if delta.finish is not None or delta.answer is not NO_ANSWER:
                return None
            output = _output(delta)
            if delta.scores is not NO_TOKEN_LOGPROBS:
                num_ids += delta.scores.num_ids
                if num_ids > logprobs.MANY:
                    return None
                output += logprobs.written(delta.scores, logprobs.OUTPUT_SCORES)
            deltas += _DELTAS + varint(len(output)) + output
        self.sequence += 1
        return deltas + _SEQUENCE + varint(self.sequence)

    async def full(self, update: Update, start: Start) -> pb.StreamGenerateResponse:
        """Return the next response, whatever it holds; the first includes `start`. Raise InternalFailure."""
        self.sequence += 1
        response = codec.stream_message(update, self.sequence, None if self.has_begun else start)
        self.has_begun = True
        await logprobs.add_to_message(response, update)
        if self.message_type is not None:
            await messages.add(response.deltas, update.deltas, self.message_type)
        return response

    def heartbeat(self) -> pb.StreamGenerateResponse:
        """Return the next response, which has only a sequence."""
        self.sequence += 1
        return pb.StreamGenerateResponse(sequence=self.sequence)


def _output(delta: OutputDelta) -> bytes:
    """Return an Output with the text and ids of `delta`, in wire form."""
    output = _INDEX + varint(delta.index) if delta.index else b""
    if delta.text:
        text = delta.text.encode()
        output += _TEXT + varint(len(text)) + text
    if delta.token_ids:
        packed = b"".join([varint(id) for id in delta.token_ids])
        output += _TOKEN_IDS + varint(len(packed)) + packed
    return output
