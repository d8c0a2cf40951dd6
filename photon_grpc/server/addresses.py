"""Addresses of a server: HOST:PORT or unix:PATH, bound or refused with the reason.

gRPC reports only that binding failed, and silently takes over the Unix path of a live server.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from photon_grpc.config.resolve import split_address
from photon_grpc.errors import ConfigError

if TYPE_CHECKING:
    # The supervisor checks addresses without loading gRPC.
    import grpc

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]/\s]+):(?P<port>\d{1,5})")
_UNIX = "unix:"
_WILDCARDS = frozenset({"0.0.0.0", "::"})
#: sockaddr_un holds 108 bytes with the closing zero.
_MAX_UNIX_PATH_BYTES = 107


def bind(
    server: grpc.aio.Server,
    address: str,
    *,
    reuse_port: bool,
    credentials: grpc.ServerCredentials | None = None,
    unix_mode: int | None = None,
) -> str:
    """Make `server` listen at `address`; return the bound address, with the port that was chosen for port 0.

    With `reuse_port` processes may share a port, never a Unix path. Only a Unix socket without listener is replaced. A
    port uses `credentials`; a Unix socket is plain text, guarded by its mode: `unix_mode`, or what the umask leaves.
    Raise ConfigError naming the address and what to do.
    """
    if address.startswith(_UNIX):
        return _bind_unix(server, address, unix_mode)
    return _bind_tcp(server, address, reuse_port, credentials)


def check(address: str, *, reuse_port: bool) -> None:
    """Raise the ConfigError of `bind` if the address cannot be bound now."""
    if address.startswith(_UNIX):
        reason = _why_not_unix(_unix_path(address))
    else:
        match = _HOST_PORT.fullmatch(address)
        if match is None or int(match["port"]) > 65535:
            raise _refused(address, "this is not an address", "write HOST:PORT (IPv6 as [HOST]:PORT) or unix:PATH")
        reason = _why_not_tcp(match["host"].strip("[]"), int(match["port"]), reuse_port)
    if reason:
        raise _refused(address, *reason)


def check_apart(addresses: Iterable[str]) -> None:
    """Raise ConfigError if two addresses are the same to the system, however they are spelled.

    Examples are a name and its number, a port on all addresses and on one, and a Unix path through a link.
    """
    placed = [(address, _places(address)) for address in addresses]
    for (one, ones), (other, others) in itertools.combinations(placed, 2):
        if any(_is_same(*pair) for pair in itertools.product(ones, others)):
            raise ConfigError(
                f"{one} and {other} are one place to listen at; give each listener its own "
                "(--listen, --http-listen, --admin-listen, --metrics-listen)",
                field="listen",
            )


def _places(address: str) -> set[tuple[str, int]]:
    """Return an address's places: (path, 0) or (IP address, port); none for port 0 and unknown names."""
    if address.startswith(_UNIX):
        return {(os.path.realpath(_unix_path(address)), 0)}
    host, port = split_address(address)
    if port == 0:
        return set()
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        return {(str(where[0]), port) for *_, where in found}
    return set()


def _is_same(one: tuple[str, int], other: tuple[str, int]) -> bool:
    # For either wildcard gRPC listens at all addresses of both families.
    return one == other or (one[1] == other[1] and not _WILDCARDS.isdisjoint((one[0], other[0])))


def _unix_path(address: str) -> str:
    path = address.removeprefix(_UNIX)
    return path.removeprefix("//") if path.startswith("///") else path


def _bind_tcp(
    server: grpc.aio.Server, address: str, reuse_port: bool, credentials: grpc.ServerCredentials | None
) -> str:
    check(address, reuse_port=reuse_port)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise _refused(address, "the system refused it", "choose another address") from None
    return f"{address.rpartition(':')[0]}:{port}"


def _bind_unix(server: grpc.aio.Server, address: str, mode: int | None) -> str:
    check(address, reuse_port=False)
    path = _unix_path(address)
    try:
        with _created_with(mode):
            server.add_insecure_port(f"{_UNIX}{path}")
    except RuntimeError:
        raise _refused(address, "the system refused it", "see whether the directory is writable") from None
    return f"{_UNIX}{path}"


@contextlib.contextmanager
def _created_with(mode: int | None) -> Iterator[None]:
    """Create files with `mode` inside the context; None leaves the process's umask."""
    if mode is None:
        yield
        return
    before = os.umask(0o777 & ~mode)
    try:
        yield
    finally:
        os.umask(before)


def _why_not_unix(path: str) -> tuple[str, str] | None:
    """Return what prevents binding `path`, and what to do; None if nothing does."""
    if not path:
        return "the path is empty", "write unix:PATH"
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        return f"a socket's path has at most {_MAX_UNIX_PATH_BYTES} bytes", "choose a shorter path"
    directory = os.path.dirname(path) or "."
    if not os.path.isdir(directory):
        return "its directory does not exist", f"create {directory}"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "its directory is not writable for this user", "choose another path"
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(mode):
        return "the path exists and is not a socket", "choose another path"
    return ("another server listens there", "stop it or choose another path") if _is_answered(path) else None


def _is_answered(path: str) -> bool:
    """Return whether a process listens on this socket; the file of a dead one remains."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            # A server is there, but full, slow or not ours.
            return True
        return True


def _why_not_tcp(host: str, port: int, reuse_port: bool) -> tuple[str, str] | None:
    """Return why a plain socket cannot be bound, since gRPC hides the reason and floods the terminal."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
            probe.bind(where)
            if not reuse_port:
                # With reuse_port, even a brief listener would receive connections meant for the others.
                probe.listen(1)
    except (socket.gaierror, UnicodeError):
        return "the host name is unknown", "use an address of this machine, for example 127.0.0.1"
    except OSError as error:
        return _explained(error)
    return None


def _explained(error: OSError) -> tuple[str, str]:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                "the port is in use",
                "stop the program that uses it, choose another port, or port 0 for any free one",
            )
        case errno.EACCES:
            return "the port needs privileges", "choose one above 1023"
        case errno.EADDRNOTAVAIL:
            return "the address is not one of this machine", "use 127.0.0.1, 0.0.0.0 or an address of this machine"
        case _:
            return (error.strerror or "the system refused it").lower(), "choose another address"


def _refused(address: str, reason: str, remedy: str) -> ConfigError:
    flags = "--listen, --http-listen, --admin-listen"
    return ConfigError(f"cannot listen at {address}: {reason}; {remedy} ({flags})", field="listen")
