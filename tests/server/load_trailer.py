"""The load report in the trailers of a call, read from the socket, since gRPC's clients hide it."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from photon_grpc.server.standard.load_report import OrcaLoadReport
from tests.attack.http2 import HEADERS, SETTINGS, connected, frame, grpc_message

KEY = b"endpoint-load-metrics-bin"
#: A setting of gRPC: values of -bin keys are sent raw after a zero octet instead of in base64.
_TRUE_BINARY = frame(SETTINGS, payload=struct.pack(">HI", 0xFE03, 1))


async def load_trailer(address: str, path: str, message: bytes = b"", **headers: str) -> Any:
    """Return the report of one call on its own connection, however it ends; None if its trailers have none."""
    return await asyncio.to_thread(_read, address, path, message, headers)


def _read(address: str, path: str, message: bytes, headers: dict[str, str]) -> Any:
    with connected(address) as connection:
        connection.send(_TRUE_BINARY)
        connection.call(1, path, grpc_message(message), **headers)
        for found in connection.frames():
            if found.stream == 1 and found.ends_stream:
                assert found.kind == HEADERS
                return _report(found.payload)
    raise AssertionError("the connection was closed")


def _report(block: bytes) -> Any:
    _, key, rest = block.partition(KEY)
    if not key:
        return None
    length, at = rest[0], 1
    if length == 127:
        while True:
            length += (rest[at] & 127) << (7 * (at - 1))
            at += 1
            if rest[at - 1] < 128:
                break
    value = rest[at : at + length]
    assert value[0] == 0
    return OrcaLoadReport.FromString(value[1:])
