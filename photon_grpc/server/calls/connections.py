"""Ends one connection, which gRPC offers to no Python server."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

#: Descriptors of this process, on Linux and macOS.
_DESCRIPTORS = "/dev/fd"
_DISCARDED_BYTES = 1 << 20
_INTERNET = (socket.AF_INET, socket.AF_INET6)
#: What is still on its way is not waited for: the other end is told at once.
_WITH_A_RESET = struct.pack("ii", 1, 0)

Address = tuple[IPv4Address | IPv6Address, int]


def hang_up(peer: str) -> bool:
    """Shut down the TCP connection from `peer`, named as gRPC names it: `ipv4:127.0.0.1:4711`. gRPC then finds it
    closed and drops its calls, unread ones too. False where there is none: it has ended, or is a Unix socket, whose
    peers have no names."""
    if (wanted := _named(peer)) is None:
        return False
    for copy in _sockets():
        with copy:
            if copy.family in _INTERNET and _peer(copy) == wanted:
                # It may be closed from the other end meanwhile.
                with contextlib.suppress(OSError):
                    copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _WITH_A_RESET)
                    copy.shutdown(socket.SHUT_RDWR)
                _discard(copy)
                return True
    return False


def _discard(connection: socket.socket) -> None:
    """Throw away the bytes that wait to be read: gRPC would still read them."""
    with contextlib.suppress(OSError):
        while connection.recv(_DISCARDED_BYTES, socket.MSG_DONTWAIT):
            pass


def _named(peer: str) -> Address | None:
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = unquote(rest).rpartition(":")
    return _plain(host.strip("[]")), int(port)


def _sockets() -> Iterator[socket.socket]:
    """Of this process, each as a copy of its descriptor, which gRPC may close meanwhile."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = os.dup(descriptor)
        except (OSError, ValueError):
            continue
        yield socket.socket(fileno=copy)


def _peer(connection: socket.socket) -> Address | None:
    try:
        host, port = connection.getpeername()[:2]
    except OSError:  # it listens, or is closed already
        return None
    return _plain(host), port


def _plain(host: str) -> IPv4Address | IPv6Address:
    """Return the same for an IPv4 address however it is written."""
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
