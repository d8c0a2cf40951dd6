"""Commands for a server that has just started, to paste as they are."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from photon_grpc.cli.terminal.connection import PUBLIC, TLS_CA, TLS_CERT, TLS_KEY

DEFAULT_TARGET = "127.0.0.1:50051"
_PROMPT = "class Stack:"
_NUM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server, as clients on this machine reach it. The environment has their key and certificates."""

    #: Of gRPC.
    target: str
    #: URL of the page; empty without an HTTP server.
    page: str
    model: str
    #: It answers chats.
    chats: bool


def examples(server: ServerAddress, environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Return (what it is, what to paste): the page, curl, Python, grpcurl, then this program."""
    target = "" if server.target == DEFAULT_TARGET else f" --target {server.target}"
    page = [("the page: chat, and the engine at work", server.page), ("curl", curl(server, environ))]
    return [
        *(page if server.page else ()),
        ("Python", python(server.target)),
        ("grpcurl", grpcurl(server.target, environ)),
        ("another prompt; a conversation", f"{command_path()} generate{target} {shlex.quote(_PROMPT)}"),
        ("", f"{command_path()} chat{target}"),
    ]


def curl(server: ServerAddress, environ: Mapping[str, str]) -> str:
    """Return a streaming request in OpenAI's form."""
    prompt: dict[str, object] = {"prompt": _PROMPT}
    path = "completions"
    if server.chats:
        path, prompt = "chat/completions", {"messages": [{"role": "user", "content": _PROMPT}]}
    body = {"model": server.model, **prompt, "max_tokens": _NUM_TOKENS, "temperature": 0, "stream": True}
    access = "".join(_access(environ, ("--cacert", "--cert", "--key"), "Authorization"))
    url = f"{server.page}v1/{path} -H 'Content-Type: application/json'"
    return f"curl -N {access}{url} \\\n  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"


def grpcurl(target: str, environ: Mapping[str, str]) -> str:
    """Return a streaming request to StreamGenerate."""
    has_tls = any(environ.get(name) for name in (TLS_CA, TLS_CERT))
    access = "".join(_access(environ, ("-cacert", "-cert", "-key"), "authorization"))
    request = shlex.quote(json.dumps({"text": "import os", "stop": {"max_tokens": 32}}))
    method = "photon_grpc.v1.InferenceService/StreamGenerate"
    return f"grpcurl {'' if has_tls else '-plaintext '}{access}-d {request} \\\n  {target} {method}"


def _access(environ: Mapping[str, str], flags: tuple[str, str, str], header: str) -> Iterator[str]:
    """Yield the flags for the certificates and the key in the environment; the key itself stays there."""
    for flag, variable in zip(flags, (TLS_CA, TLS_CERT, TLS_KEY), strict=True):
        if (file := environ.get(variable)) and file != PUBLIC:
            yield f"{flag} {shlex.quote(file)} "
    if environ.get("PHOTON_API_KEY"):
        yield f'-H "{header}: Bearer $PHOTON_API_KEY" '


def python(target: str) -> str:
    return (
        "from photon_grpc.client import SyncClient\n"
        f'for delta in SyncClient("{target}").stream("def fib(n):", max_tokens={_NUM_TOKENS}):\n'
        '    print(delta.text, end="", flush=True)'
    )


def command_path() -> str:
    """Return the command with which the user starts this program."""
    if shutil.which("photon-grpc"):
        return "photon-grpc"
    beside = Path(sys.executable).with_name("photon-grpc")
    return os.path.relpath(beside) if beside.exists() else f"{os.path.relpath(sys.executable)} -m photon_grpc"
