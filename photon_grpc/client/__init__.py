"""A typed client for a photon_grpc server: asyncio first, without torch.

    from photon_grpc.client import Client

    async with Client("127.0.0.1:50051") as client:
        async for delta in client.stream("def fib(n):", max_tokens=64):
            print(delta.text, end="")

Failures are the exceptions of `photon_grpc.errors`, rebuilt from the status's details.
"""

from photon_grpc.client.client import Client
from photon_grpc.client.generation import Delta, Finish, Generation, Output
from photon_grpc.client.message_type import MessageMismatch
from photon_grpc.client.model import Model
from photon_grpc.client.multiplex import Multiplex
from photon_grpc.client.status import Unreachable
from photon_grpc.client.stream import Stream
from photon_grpc.client.sync import SyncClient, SyncMultiplex, SyncStream
from photon_grpc.client.tools import read_tool_message, tools_json
from photon_grpc.core.fields import Options
from photon_grpc.core.generation import Candidate, Prompt, Start, Timing, TokenScore, ToolCall, Usage

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
    "tools_json",
    "read_tool_message",
]
