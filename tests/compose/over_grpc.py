"""A gRPC server above an LLM: the wire is real, but there is only one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from photon_grpc import LLM
from photon_grpc.config.flags import ServerConfig
from photon_grpc.server.server import Server


@contextmanager
def over_grpc(llm: LLM) -> Iterator[str]:
    """Yield the address of a server on the front end of an LLM."""
    program = llm._program

    async def start() -> tuple[Server, str]:
        server = Server(program._frontend, config=ServerConfig())
        return server, (await server.start(("127.0.0.1:0",), reuse_port=False))[0]

    server, address = program.wait(start())
    try:
        yield address
    finally:
        program.wait(server.drain_and_stop(0))
