"""The failure of a call, read with the library that clients use."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


async def failure(call: object) -> grpc.aio.AioRpcError:
    """Return the error with which `call` (unary or stream) ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


class AsCall:
    """An AioRpcError with the interface that grpc_status reads."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code
        self.details = error.details
        self.trailing_metadata = lambda: tuple(error.trailing_metadata())


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    status = rpc_status.from_call(AsCall(error))
    assert status is not None
    return status


def info_of(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    assert status_of(error).details[0].Unpack(info)
    return info


def trailer(error: grpc.aio.AioRpcError, key: str) -> str | bytes | None:
    return dict(error.trailing_metadata()).get(key)
