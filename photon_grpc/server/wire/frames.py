"""Items of a multiplexed stream in wire form. Joined, they are a MultiplexGenerateResponse.

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from google.rpc.status_pb2 import Status

from photon_grpc.core.generation import Start
from photon_grpc.frontend.output.update import Update
from photon_grpc.server.wire.responses import ResponseWriter
from photon_grpc.server.wire.varint import varint
from photon_grpc.v1 import inference_pb2 as pb

#: Tags: the field's number and its wire type, 0 for a varint, 2 for length-prefixed data.
_ITEM = b"\x0a"  # MultiplexGenerateResponse.items
_HANDLE, _RESPONSE = b"\x08", b"\x1a"  # MultiplexItem


class ItemWriter:
    """Writer of the items of one request."""

    __slots__ = ("_handle", "_handle_field", "_request_id", "responses")

    def __init__(self, handle: int, request_id: str) -> None:
        self._handle = handle
        self._handle_field = _HANDLE + varint(handle)
        self._request_id = request_id
        self.responses = ResponseWriter()

    def plain(self, update: Update) -> bytes | None:
        """Return the next item; None if ResponseWriter.plain cannot write it, so that `full` must."""
        response = self.responses.plain(update)
        if response is None:
            return None
        item = self._handle_field + _RESPONSE + varint(len(response)) + response
        return _ITEM + varint(len(item)) + item

    def heartbeat(self) -> bytes:
        """Return an item whose response has only a sequence."""
        return self._of(self.responses.heartbeat())

    async def full(self, update: Update, start: Start) -> bytes:
        """Return the next item, whatever it holds; the first includes `start`. Raise InternalFailure."""
        return self._of(await self.responses.full(update, start))

    def error(self, error: Status) -> bytes:
        """Return the item for the request's failure."""
        return _framed(pb.MultiplexItem(handle=self._handle, request_id=self._request_id, error=error))

    def _of(self, response: pb.StreamGenerateResponse) -> bytes:
        request_id = "" if response.sequence > 1 else self._request_id
        return _framed(pb.MultiplexItem(handle=self._handle, request_id=request_id, response=response))


def _framed(item: pb.MultiplexItem) -> bytes:
    return pb.MultiplexGenerateResponse(items=[item]).SerializeToString()
