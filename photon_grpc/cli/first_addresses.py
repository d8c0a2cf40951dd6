"""The addresses of `make run`: gRPC's, and those of an HTTP server beside it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from photon_grpc.cli.server_libraries import missing_for_http
from photon_grpc.config.resolve import split_address
from photon_grpc.config.settings import by_name
from photon_grpc.errors import ConfigError

#: Where callers of OpenAI-compatible servers look.
DEFAULT_PAGE = "127.0.0.1:8000"


def choose_address(address: str, flag: str = "--listen") -> str:
    """Return the address with port 0 replaced by a free one. Raise ConfigError if it is in use."""
    if address.startswith("unix:"):
        return address
    host, port = split_address(address)
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return f"{host}:{probe.getsockname()[1]}"
    except OSError as error:
        advice = f"choose another with {flag} HOST:PORT (port 0: any free one)"
        raise ConfigError(f"{flag}: {address}: {error.strerror}; {advice}", field=flag) from error


def target_of(address: str) -> str:
    """Return the address at which a client on this machine reaches the listener, also one on all interfaces."""
    return address.replace("0.0.0.0:", "127.0.0.1:", 1).replace("[::]:", "[::1]:", 1)


def http_addresses(given: Sequence[str], environ: Mapping[str, str] = os.environ, *, once: bool) -> tuple[str, ...]:
    """Return the addresses of the HTTP server that the user has given, or else 127.0.0.1:8000, or a free port.

    Return none if a variable has them, and if the libraries of HTTP are missing.
    """
    if given or environ.get(by_name()["http_listen"].variable, "").strip() or missing_for_http():
        return tuple(given)
    return ("127.0.0.1:0",) if once or _is_taken(DEFAULT_PAGE) else (DEFAULT_PAGE,)


def _is_taken(address: str) -> bool:
    try:
        choose_address(address)
    except ConfigError:
        return True
    return False
