"""Closing of one connection, which grpc.aio has no API for."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

#: The file descriptors of this process, on Linux and macOS.
_DESCRIPTORS = "/dev/fd"
_DISCARDED_BYTES = 1 << 20
_INTERNET = (socket.AF_INET, socket.AF_INET6)
#: SO_LINGER with 0 s: send RST at once instead of waiting for unsent data.
_WITH_A_RESET = struct.pack("ii", 1, 0)

Address = tuple[IPv4Address | IPv6Address, int]


def hang_up(peer: str) -> bool:
    """Shut down the TCP connection from `peer`, given as gRPC writes it (`ipv4:127.0.0.1:4711`).

    gRPC then drops the connection's calls, including those not read yet. Return False if there is no such connection:
    it has ended, or it is a Unix socket, whose peers have no names.
    """
    if (address := _parse_peer(peer)) is None:
        return False
    for copy in _sockets():
        with copy:
            if copy.family in _INTERNET and _peer_address(copy) == address:
                # The peer may have closed it meanwhile.
                with contextlib.suppress(OSError):
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _WITH_A_RESET)
                    copy.shutdown(socket.SHUT_RDWR)
                _discard(copy)
                return True
    return False


def _discard(connection: socket.socket) -> None:
    """Discard the unread bytes, which gRPC would still read."""
    with contextlib.suppress(OSError):
        while connection.recv(_DISCARDED_BYTES, socket.MSG_DONTWAIT):
            pass


def _parse_peer(peer: str) -> Address | None:
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = unquote(rest).rpartition(":")
    return _parse_ip(host.strip("[]")), int(port)


def _sockets() -> Iterator[socket.socket]:
    """Yield the sockets of this process, each as a duplicate descriptor, since gRPC may close its own meanwhile."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = os.dup(descriptor)
        except (OSError, ValueError):
            continue
        yield socket.socket(fileno=copy)


def _peer_address(connection: socket.socket) -> Address | None:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it listens, or is closed already
        return None
    return _parse_ip(host), port


def _parse_ip(host: str) -> IPv4Address | IPv6Address:
    """Parse an IP address, with IPv4-mapped IPv6 as IPv4."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
