"""The addresses of the front ends, for gRPC and for HTTP.

A single front end owns its addresses, and a port in use is an error. Several share their TCP ports (SO_REUSEPORT),
which the supervisor reserves as long as it lives; front end 0 owns the Unix sockets.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from photon_grpc.config.flags import NO_ADMIN, ServerConfig
from photon_grpc.config.resolve import split_address
from photon_grpc.errors import ConfigError
from photon_grpc.server.addresses import check, check_apart


@dataclass(frozen=True, slots=True)
class Listeners:
    """The addresses that each front end binds."""

    addresses: tuple[str, ...] = ()
    reuse_port: bool = False
    #: Bound, never listening: they keep the port numbers reserved while a front end is restarted.
    reserved: tuple[socket.socket, ...] = ()

    def of(self, frontend: int) -> tuple[str, ...]:
        if frontend == 0:
            return self.addresses
        return tuple(address for address in self.addresses if not address.startswith("unix:"))

    def close(self) -> None:
        for sock in self.reserved:
            sock.close()


@dataclass(slots=True)
class ServiceListeners:
    """The addresses of all front ends."""

    grpc: Listeners = Listeners()
    http: Listeners = Listeners()

    def close(self) -> None:
        self.grpc.close()
        self.http.close()


def plan_service(server: ServerConfig) -> ServiceListeners:
    """Plan the addresses for gRPC and HTTP. Raise ConfigError as `plan_listeners` does; then none is reserved."""
    grpc = plan_listeners(server.listen, server.frontends)
    try:
        return ServiceListeners(grpc, plan_listeners(server.http_listen, server.frontends))
    except ConfigError:
        grpc.close()
        raise


def plan_listeners(addresses: tuple[str, ...], frontends: int) -> Listeners:
    """Plan the addresses of all front ends. Raise ConfigError if one is in use, or none can be shared."""
    if not addresses or frontends == 1:
        for address in addresses:
            check(address, reuse_port=False)
        return Listeners(addresses, reuse_port=False)
    if all(address.startswith("unix:") for address in addresses):
        raise ConfigError(
            f"--frontends {frontends}: several front ends need a TCP port, since they cannot share a Unix socket; "
            "add --listen HOST:PORT or omit --frontends",
            field="--frontends",
        )
    planned: list[str] = []
    reserved: list[socket.socket] = []
    for address in addresses:
        if address.startswith("unix:"):
            check(address, reuse_port=False)
            planned.append(address)
        else:
            sock, address = _reserve(address)
            planned.append(address)
            reserved.append(sock)
    return Listeners(tuple(planned), reuse_port=True, reserved=tuple(reserved))


def _reserve(address: str) -> tuple[socket.socket, str]:
    """Return a socket bound to the address, and the address with the actual port if it was 0."""
    host, port = split_address(address)
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        _probe(family, kind, where)
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections of an earlier server on this port may still wait for their last packets.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; choose another HOST:PORT, port 0 for any free one "
            "(--listen, --http-listen)",
            field="--listen",
        ) from error
    return sock, f"{host}:{sock.getsockname()[1]}"


def _probe(family: int, kind: int, where: tuple[object, ...]) -> None:
    """Bind without SO_REUSEPORT, to detect another service that shares its port."""
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)


def admin_address(setting: str) -> str:
    """Return the address at which front end 0 serves AdminService.

    It is the setting, "" for "none", or if the setting is empty a Unix socket named after this process.
    """
    if setting:
        return "" if setting == NO_ADMIN else setting
    return f"unix:{_socket_directory()}/photon-grpc-{os.getpid()}.sock"


def check_admin(setting: str) -> None:
    """Raise ConfigError if the setting is an address in use."""
    if setting not in ("", NO_ADMIN):
        check(setting, reuse_port=False)


def check_distinct(server: ServerConfig) -> None:
    """Raise ConfigError if two of the addresses in the settings are the same."""
    admin = "" if server.admin_listen == NO_ADMIN else server.admin_listen
    check_apart(filter(None, (*server.listen, *server.http_listen, admin, server.metrics_listen)))


def admin_sockets() -> tuple[str, ...]:
    """Return the default admin sockets that answer and belong to this user or root."""
    found = sorted(Path(_socket_directory()).glob("photon-grpc-*.sock"))
    return tuple(f"unix:{path}" for path in found if _is_ours(path))


def _is_ours(path: Path) -> bool:
    # In a directory shared with others any user may listen, and callers may send a key.
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(str(path))
        return path.stat().st_uid in (os.getuid(), 0)
    return False


def _socket_directory() -> str:
    """Return a directory of this user, or that for temporary files; if none is writable, binding fails there."""
    with contextlib.suppress(FileNotFoundError):
        return os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return "/tmp"


@dataclass(frozen=True, slots=True)
class UnixPath:
    """A Unix socket that a front end has bound, to be removed if it could not do so itself."""

    path: str
    inode: int

    @classmethod
    def of(cls, address: str) -> UnixPath | None:
        path = address.removeprefix("unix:")
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if address.startswith("unix:") and stat.S_ISSOCK(found.st_mode):
                return cls(path, found.st_ino)
        return None

    def remove(self) -> None:
        """Remove the socket, unless another server has replaced it."""
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self.inode:
                os.unlink(self.path)
