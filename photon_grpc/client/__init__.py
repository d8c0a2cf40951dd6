"""A typed client for a photon_grpc server: asyncio first, without torch.

    from photon_grpc.client import Client

    async with Client("127.0.0.1:50051") as client:
        async for delta in client.stream("def fib(n):", max_tokens=64):
            print(delta.text, end="")

Failures are the exceptions of `photon_grpc.errors`, rebuilt from the status's details. What needs grpc is resolved on
first use, because `LLM` imports parts of this package and makes no calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from photon_grpc.client.generation import Delta, Finish, Generation, Output
from photon_grpc.client.message_type import MessageMismatch, WrongMessageType, unpack
from photon_grpc.client.model import Model
from photon_grpc.client.tools import read_tool_message, tools_json
from photon_grpc.core.fields import Options
from photon_grpc.core.generation import Candidate, Prompt, Start, Timing, TokenScore, ToolCall, Usage

if TYPE_CHECKING:
    from photon_grpc.client.client import Client
    from photon_grpc.client.multiplex import Multiplex
    from photon_grpc.client.status import Unreachable, reason_of
    from photon_grpc.client.stream import Stream
    from photon_grpc.client.sync import SyncClient, SyncMultiplex, SyncStream

#: The files of the names that need grpc.
_FILES = {
    "Client": "client",
    "Multiplex": "multiplex",
    "Stream": "stream",
    "SyncClient": "sync",
    "SyncMultiplex": "sync",
    "SyncStream": "sync",
    "Unreachable": "status",
    "reason_of": "status",
}

__all__ = [
    "Client",
    "SyncClient",
    "Stream",
    "Multiplex",
    "SyncStream",
    "SyncMultiplex",
    "Prompt",
    "Options",
    "Delta",
    "Start",
    "Output",
    "Finish",
    "TokenScore",
    "Candidate",
    "ToolCall",
    "Usage",
    "Timing",
    "Generation",
    "Model",
    "Unreachable",
    "MessageMismatch",
    "WrongMessageType",
    "reason_of",
    "unpack",
    "tools_json",
    "read_tool_message",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
