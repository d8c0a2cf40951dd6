"""The API key and TLS of the verbs that call a server: variables, which the client processes of `bench` inherit."""

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

#: The value of --tls-ca for the authorities that come with gRPC.
PUBLIC = "public"

_SPEAKS_TLS = f"uses TLS: name the authority to trust with --tls-ca FILE ('{PUBLIC}': the authorities of browsers)."
_WANTS_CERTIFICATE = "accepts only clients with a certificate that it trusts: pass one with --tls-cert and --tls-key."
_ADVICE_ON_TLS = (
    f"Name the authority to trust with --tls-ca FILE ('{PUBLIC}': those of browsers) and, if the server asks for one, "
    "your certificate with --tls-cert and --tls-key. Without these and PHOTON_TLS_CA, the connection is in clear text."
)

#: Names that gRPC itself resolves, with a default port: `dns:///host`.
_RESOLVED = re.compile(r"(dns|ipv4|ipv6|xds|unix-abstract|vsock):")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<address>[^/]+)")


class ClientKeywords(TypedDict):
    """Keyword arguments of a Client."""

    credentials: Any
    metadata: tuple[tuple[str, str], ...]


def connection() -> ClientKeywords:
    """Return the credentials and metadata that the environment sets. Raise ConfigError for an unreadable file."""
    return {"credentials": tls_credentials(), "metadata": key_metadata()}


def admin_connection(target: str) -> ClientKeywords:
    """Return the same for AdminService, whose Unix socket is in clear text even if ports use TLS."""
    return {"credentials": None, "metadata": key_metadata()} if target.startswith("unix:") else connection()


def check_target(target: str) -> str:
    """Return the target. Raise ConfigError, with what to write instead, if it has no port or is a URL."""
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
    """Return the metadata with the key in PHOTON_API_KEY; no flag sets it, since others can read command lines."""
    key = os.environ.get("PHOTON_API_KEY", "")
    return (("authorization", f"Bearer {key}"),) if key else ()


def tls_credentials() -> Any:
    """Return TLS credentials; None, for clear text, if no file is named. Raise ConfigError for an unreadable file."""
    ca, cert, key = (os.environ.get(name, "") for name in (TLS_CA, TLS_CERT, TLS_KEY))
    if not (ca or cert or key):
        return None
    if bool(cert) != bool(key):
        raise ConfigError("--tls-cert and --tls-key go together", field="--tls-key" if cert else "--tls-cert")
    from photon_grpc.client.channel import tls_credentials as make_credentials

    roots = None if ca in ("", PUBLIC) else _read(ca, "--tls-ca")
    chain, private_key = _read(cert, "--tls-cert") if cert else None, _read(key, "--tls-key") if key else None
    return make_credentials(roots, chain, private_key)


def advice_on_reaching(error: PhotonError) -> str:
    """Return advice about an Unreachable; "" if its message has it."""
    from photon_grpc.client import Unreachable

    target = error.target if isinstance(error, Unreachable) else ""
    if "TLS handshake failed" in str(error):
        return _ADVICE_ON_TLS
    # gRPC reports only its last attempt; if a name has two addresses, perhaps not the one that uses TLS.
    if _speaks_tls(target):
        shown = any(os.environ.get(name) for name in (TLS_CA, TLS_CERT))
        return f"{target} {_WANTS_CERTIFICATE if shown else _SPEAKS_TLS}"
    if isinstance(error, Unreachable) and error.is_answered:
        return ""
    return "Is a server running? Start one with `photon-grpc serve`, or give its address with --target."


def _speaks_tls(target: str) -> bool:
    """Return whether a server at HOST:PORT accepts a TLS handshake."""
    import socket
    import ssl

    if target.startswith("unix:"):
        return False
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError, UnicodeError, ConfigError):
        host, port = split_address(target)
        with socket.create_connection((host.strip("[]"), port), _PROBE_TIMEOUT_S) as plain, context.wrap_socket(plain):
            return True
    return False


def with_tls(function: F) -> F:
    """Add the flags that name the files of TLS."""
    options = (
        ("--tls-ca", TLS_CA, f"Connect with TLS and trust this authority (PEM); '{PUBLIC}': those of browsers."),
        ("--tls-cert", TLS_CERT, "Certificate of the client (PEM), for a server that asks for one."),
        ("--tls-key", TLS_KEY, "Private key of --tls-cert (PEM)."),
    )
    for flag, variable, text in reversed(options):
        function = click.option(
            flag, envvar=variable, metavar="FILE", help=text, expose_value=False, callback=_set(variable)
        )(function)
    return function


def with_target(function: F) -> F:
    """Add the flags of a server's address and of the connection to it."""
    return click.option(
        "--target",
        envvar="PHOTON_TARGET",
        default="127.0.0.1:50051",
        show_default=True,
        metavar="ADDR",
        help="Address of the server: HOST:PORT or unix:PATH.",
        callback=lambda _context, _option, target: check_target(target),
    )(with_tls(function))


def with_admin_target(function: F) -> F:
    """Add the flag for the address of AdminService."""
    return click.option(
        "--target",
        metavar="ADDR",
        help="Address of AdminService: unix:PATH or HOST:PORT. Unset: that of the only server on this machine; "
        "PHOTON_TARGET, the address for inference, is not read.",
    )(function)


def only_admin_service() -> str:
    """Return the AdminService address of this user's server. Raise ConfigError if there is none, or several."""
    from photon_grpc.service.endpoints.listen import admin_sockets

    found = admin_sockets()
    if not found:
        raise ConfigError(
            "no server of this user was found on this machine; give the address of its AdminService with --target "
            "(the server logs it at start: `admin service on …`)"
        )
    if len(found) > 1:
        lines = "".join(f"\n  {address}  {_command(address)}" for address in found)
        raise ConfigError(f"{len(found)} servers are running; choose one with --target:{lines}")
    return found[0]


def _command(address: str) -> str:
    """Return the command line of the process in the socket's name; "" if there is no /proc."""
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
