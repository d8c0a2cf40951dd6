"""`hang_up` ends one connection and no other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from photon_grpc.server.calls.connections import hang_up

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::ffff:127.0.0.1")])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Return the client's end and the server's end of a connection."""
    family, host = request.param
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    bound = "::" if host.startswith("::ffff") else host
    with (
        socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::") as listener,
        socket.create_connection((host, listener.getsockname()[1]), timeout=5) as client,
    ):
        server, _ = listener.accept()
        with server:
            server.settimeout(5)
            yield client, server


def peer(client: socket.socket) -> str:
    """Return the peer as gRPC writes it."""
    host, port = client.getsockname()[:2]
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def is_open(client: socket.socket, server: socket.socket) -> bool:
    try:
        client.sendall(b"x")
        return server.recv(1) == b"x"
    except OSError:
        return False


def test_the_named_connection_is_ended(pair: Pair) -> None:
    client, server = pair
    assert hang_up(peer(client))
    assert not is_open(client, server)
    server.close()
    # The second write fails: by then the peer has reported that nobody listens.
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        client.sendall(b"x")
        client.sendall(b"x")


def test_no_other_connection_is_ended(pair: Pair) -> None:
    client, server = pair
    before = os.listdir("/dev/fd")
    host, _, port = peer(client).rpartition(":")
    for other in (f"{host}:{int(port) % 65_535 + 1}", f"ipv4:127.0.0.2:{port}", "unix:", "unix:/run/x.sock", ""):
        assert not hang_up(other)
    assert is_open(client, server)
    assert os.listdir("/dev/fd") == before
