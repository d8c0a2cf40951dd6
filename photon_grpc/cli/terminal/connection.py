"""Connections of the verbs that call a server: API key and TLS. Variables, which the client processes of `bench`
inherit; flags set those of TLS, not the key's, since others on the machine can read a command line."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import click

from photon_grpc.config.resolve import split_address
from photon_grpc.errors import ConfigError, PhotonError

F = TypeVar("F", bound=Callable[..., Any])

TLS_CA = "PHOTON_TLS_CA"
#: Not PHOTON_TLS_CERT, which is the server's.
TLS_CERT = "PHOTON_CLIENT_TLS_CERT"
TLS_KEY = "PHOTON_CLIENT_TLS_KEY"

_MAX_COMMAND_CHARS = 200
_PROBE_TIMEOUT_S = 1.0

#: For --tls-ca: the authorities that gRPC comes with.
PUBLIC = "public"

_SPEAKS_TLS = f"speaks TLS: --tls-ca FILE says which authority to trust ('{PUBLIC}': the authorities of browsers)."
_WANTS_CERTIFICATE = "ends connections without a certificate that it trusts: --tls-cert and --tls-key show one."
_ADVICE_ON_TLS = (
    f"--tls-ca FILE says which authority to trust ('{PUBLIC}': those of browsers), --tls-cert and --tls-key show a "
    "certificate; without any of them, or PHOTON_TLS_CA, the connection is in clear text."
)

#: Names that gRPC itself resolves; `dns:///host` has a port of its own.
_RESOLVED = re.compile(r"(dns|ipv4|ipv6|xds|unix-abstract|vsock):")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<address>[^/]+)")


class ClientKeywords(TypedDict):
    """Keywords of a Client."""

    credentials: Any
    metadata: tuple[tuple[str, str], ...]


def connection() -> ClientKeywords:
    """Return what the environment says. Raise ConfigError for a file that cannot be read."""
    return {"credentials": tls_credentials(), "metadata": key_metadata()}


def admin_connection(target: str) -> ClientKeywords:
    """Return the same of an AdminService: its Unix socket is in clear text, whatever ports speak."""
    return {"credentials": None, "metadata": key_metadata()} if target.startswith("unix:") else connection()


def check_target(target: str) -> str:
    """Return it. Raise ConfigError, with what to write instead, for one that names no port or is a URL."""
    if _RESOLVED.match(target):
        return target
    if url := _URL.match(target):
        tls = f" --tls-ca {PUBLIC}" if url["scheme"] in ("https", "grpcs") else ""
        instead = f"--target {_with_port(url['address'])}{tls}"
        raise ConfigError(f"--target: {target!r} is a URL, not an address; write {instead}", field="--target")
    if ":" not in target and target:
        raise ConfigError(f"--target: {target!r} names no port; write --target {_with_port(target)}", field="--target")
    split_address(target, "--target")
    return target


def _with_port(address: str) -> str:
    return address if address.rpartition(":")[2].isdecimal() else f"{address}:50051"


def key_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata of every call: the key in PHOTON_API_KEY, or nothing."""
    key = os.environ.get("PHOTON_API_KEY", "")
    return (("authorization", f"Bearer {key}"),) if key else ()


def tls_credentials() -> Any:
    """None, for clear text, where no file of TLS is named. Raise ConfigError for one that cannot be read."""
    ca, cert, key = (os.environ.get(name, "") for name in (TLS_CA, TLS_CERT, TLS_KEY))
    if not (ca or cert or key):
        return None
    if bool(cert) != bool(key):
        raise ConfigError("--tls-cert and --tls-key go together", field="--tls-key" if cert else "--tls-cert")
    from photon_grpc.client.channel import tls_credentials as made

    roots = None if ca in ("", PUBLIC) else _read(ca, "--tls-ca")
    return made(roots, _read(cert, "--tls-cert") if cert else None, _read(key, "--tls-key") if key else None)


def advice_on_reaching(error: PhotonError) -> str:
    """Return what to do about an Unreachable, "" where its message says it. gRPC tells its last attempt alone: of a
    name with two addresses perhaps not the one that speaks TLS."""
    from photon_grpc.client import Unreachable

    target = error.target if isinstance(error, Unreachable) else ""
    if "TLS handshake failed" in str(error):
        return _ADVICE_ON_TLS
    if _speaks_tls(target):
        shown = any(os.environ.get(name) for name in (TLS_CA, TLS_CERT))
        return f"{target} {_WANTS_CERTIFICATE if shown else _SPEAKS_TLS}"
    if isinstance(error, Unreachable) and error.is_answered:
        return ""
    return "Is a server running? `photon-grpc serve` starts one; --target says where it is."


def _speaks_tls(target: str) -> bool:
    """Return whether a server at HOST:PORT takes a handshake of TLS."""
    import socket
    import ssl

    if target.startswith("unix:"):
        return False
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError, UnicodeError, ConfigError):
        host, port = split_address(target)
        with (
            socket.create_connection((host.strip("[]"), port), _PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain),
        ):
            return True
    return False


def with_tls(function: F) -> F:
    """Return flags that name the files of TLS."""
    options = (
        ("--tls-ca", TLS_CA, f"Connect by TLS and trust this authority (PEM); '{PUBLIC}': those that browsers do."),
        ("--tls-cert", TLS_CERT, "Show this certificate (PEM), for a server that asks for one."),
        ("--tls-key", TLS_KEY, "Its private key (PEM)."),
    )
    for flag, variable, text in reversed(options):
        function = click.option(
            flag, envvar=variable, metavar="FILE", help=text, expose_value=False, callback=_set(variable)
        )(function)
    return function


def with_target(function: F) -> F:
    """Add the options of a server's address and of its connection."""
    return click.option(
        "--target",
        envvar="PHOTON_TARGET",
        default="127.0.0.1:50051",
        show_default=True,
        metavar="ADDR",
        help="Server: HOST:PORT or unix:PATH.",
        callback=lambda _context, _option, target: check_target(target),
    )(with_tls(function))


def with_admin_target(function: F) -> F:
    """Return the flag that says where AdminService is."""
    return click.option(
        "--target",
        metavar="ADDR",
        help="AdminService: unix:PATH or HOST:PORT. Unset: that of the one server on this machine; "
        "PHOTON_TARGET, an address of inference, is not read.",
    )(function)


def only_admin_service() -> str:
    """Address of the AdminService of this user's one server on this machine. Raise ConfigError where there is none, or
    more than one."""
    from photon_grpc.service.endpoints.listen import admin_sockets

    found = admin_sockets()
    if not found:
        raise ConfigError(
            "no server of this user was found on this machine; --target says where its AdminService is: "
            "the server tells at start, `admin service on …`"
        )
    if len(found) > 1:
        lines = "".join(f"\n  {address}  {_command(address)}" for address in found)
        raise ConfigError(f"there are several servers; choose one with --target:{lines}")
    return found[0]


def _command(address: str) -> str:
    """Return the command line of the process that this socket is named after; "" where there is no /proc."""
    pid = address.rpartition("-")[2].removesuffix(".sock")
    with contextlib.suppress(OSError):
        return " ".join(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"))[:_MAX_COMMAND_CHARS]
    return ""


def _set(variable: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def into_the_environment(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            os.environ[variable] = value

    return into_the_environment


def _read(path: str, flag: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror}", field=flag) from error
