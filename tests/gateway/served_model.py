"""The embedded model behind both servers in one program: HTTP, gRPC and `LLM` ask the same engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from photon_grpc import LLM
from photon_grpc.config.flags import ServerConfig
from photon_grpc.gateway.app import application
from photon_grpc.gateway.calls.guard import HttpRules
from photon_grpc.gateway.connections.http_server import HttpServer
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.server import Server
from tests.gateway.scripted import NoPages


@dataclass(frozen=True)
class Served:
    llm: LLM
    http: str
    grpc: str


@contextmanager
def both_servers(model: str = "", **flags: object) -> Iterator[Served]:
    with LLM(model, **flags) as llm:
        program = llm._program
        front = program._frontend
        http_server = HttpServer(application(front, HttpRules(FailureLog()), NoPages(), max_body_bytes=2**20))
        grpc_server = Server(front, config=ServerConfig())
        (http,) = program.wait(http_server.start(("127.0.0.1:0",), reuse_port=False))
        (grpc,) = program.wait(grpc_server.start(("127.0.0.1:0",), reuse_port=False))
        yield Served(llm, f"http://{http}", grpc)
        program.wait(http_server.stop(0))
        program.wait(grpc_server.drain_and_stop(0))
