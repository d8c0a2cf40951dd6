"""The other end of a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from ipaddress import IPv6Address, ip_address
from typing import Any

#: Linux's number of the state of a TCP connection that has been reset.
_TCP_CLOSE = 7


def peer_of(name: Any) -> tuple[str, str]:
    """Return the peer as gRPC writes it, and its host, from what `accept` returned."""
    if not isinstance(name, tuple):
        return "unix:", "unix:"
    host, port = str(name[0]).partition("%")[0], name[1]
    address = ip_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is None:
        return f"ipv6:[{host}]:{port}", host
    host = str(getattr(address, "ipv4_mapped", None) or host)
    return f"ipv4:{host}:{port}", host


def has_reset(transport: asyncio.Transport) -> bool:
    """Return whether the peer has reset the connection, which a transport that has read to the end does not notice."""
    raw = transport.get_extra_info("socket")
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    with contextlib.suppress(OSError, AttributeError):
        return bool(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE)
    return False
