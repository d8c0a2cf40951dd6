"""Items of a multiplexed stream in wire form: joined, they are a MultiplexGenerateResponse.

Nearly every item is a delta of text or ids alone. It is written by hand: as messages it would cost ten times as much,
more than all else that the front end does for a token. https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from photon_grpc.core.generation import Start
from photon_grpc.frontend.answer import NO_ANSWER
from photon_grpc.frontend.update import OutputDelta, Update
from photon_grpc.server import codec, messages, scores
from photon_grpc.server.message_type import MessageType
from photon_grpc.server.status import request_error
from photon_grpc.v1 import inference_pb2 as pb

#: Tags: the field's number and its type, 0 for a varint, 2 for what has a length.
_ITEM = b"\x0a"  # MultiplexGenerateResponse.items
_HANDLE, _RESPONSE = b"\x08", b"\x1a"  # MultiplexItem
_DELTAS, _SEQUENCE = b"\x12", b"\x28"  # StreamGenerateResponse
_INDEX, _TEXT, _TOKEN_IDS = b"\x08", b"\x12", b"\x1a"  # Output


def _long_varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


_NUM_SHORT = 1 << 14
_SHORT = tuple([_long_varint(value) for value in range(_NUM_SHORT)])


def _varint(value: int) -> bytes:
    return _SHORT[value] if value < _NUM_SHORT else _long_varint(value)


class ItemWriter:
    """Writes the items of one request."""

    __slots__ = ("_handle", "_handle_field", "_request_id", "_sequence", "message_type")

    def __init__(self, handle: int, request_id: str) -> None:
        self._handle = handle
        self._handle_field = _HANDLE + _varint(handle)
        self._request_id = request_id
        self._sequence = 0
        #: Of typed output.
        self.message_type: MessageType | None = None

    def plain(self, update: Update) -> bytes | None:
        """The next item; None where it holds more than new text and ids: then `full` writes it. Not for scores."""
        if update.usage is not None or not self._sequence:
            return None
        deltas = b""
        for delta in update.deltas:
            if delta.finish is not None or delta.answer is not NO_ANSWER:
                return None
            output = _output(delta)
            deltas += _DELTAS + _varint(len(output)) + output
        self._sequence += 1
        response = deltas + _SEQUENCE + _varint(self._sequence)
        item = self._handle_field + _RESPONSE + _varint(len(response)) + response
        return _ITEM + _varint(len(item)) + item

    async def full(self, update: Update, start: Start) -> bytes:
        """The next item, whatever it holds. `start` is told with the first."""
        self._sequence += 1
        is_first = self._sequence == 1
        response = codec.stream_message(update, self._sequence, start if is_first else None)
        await scores.add_to_message(response, update)
        if self.message_type is not None:
            await messages.add(response.deltas, update.deltas, self.message_type)
        request_id = self._request_id if is_first else ""
        return _framed(pb.MultiplexItem(handle=self._handle, request_id=request_id, response=response))

    def error(self, error: Exception) -> bytes:
        """The item of its failure."""
        told = request_error(error, self._request_id)
        return _framed(pb.MultiplexItem(handle=self._handle, request_id=self._request_id, error=told))


def _output(delta: OutputDelta) -> bytes:
    output = _INDEX + _varint(delta.index) if delta.index else b""
    if delta.text:
        text = delta.text.encode()
        output += _TEXT + _varint(len(text)) + text
    if delta.token_ids:
        packed = b"".join([_varint(id) for id in delta.token_ids])
        output += _TOKEN_IDS + _varint(len(packed)) + packed
    return output


def _framed(item: pb.MultiplexItem) -> bytes:
    return pb.MultiplexGenerateResponse(items=[item]).SerializeToString()
