"""Names in the settings of the HTTP server: hosts that callers may address, and web pages that may call it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from photon_grpc.config.flags import ServerConfig
from photon_grpc.errors import ConfigError

_HOST = r"(?:[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?|\[[0-9a-f:.]+\])"
_NAME = re.compile(_HOST)
#: What a browser sends in the header Origin: no path, no default port, no upper case.
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST}(?::[1-9][0-9]{{0,4}})?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


def check_http_callers(server: ServerConfig, origins: Mapping[str, str]) -> None:
    """Check --http-allowed-host and --http-allowed-origin. Raise ConfigError naming the sources in `origins`."""
    for setting in ("http_allowed_host", "http_allowed_origin"):
        if getattr(server, setting) and not server.http_listen:
            raise _refused(setting, f"{origins[setting]}: has no effect without --http-listen; set both")
    for name in server.http_allowed_host:
        if not _NAME.fullmatch(name.lower()):
            problem = "is not a host name; write it without scheme, port and path, for example llm.example.org"
            raise _refused("http_allowed_host", f"{origins['http_allowed_host']}: {name!r} {problem}")
    for origin in server.http_allowed_origin:
        if problem := _problem_of_origin(origin):
            raise _refused("http_allowed_origin", f"{origins['http_allowed_origin']}: {origin!r} {problem}")


def _problem_of_origin(origin: str) -> str:
    if "*" in origin:
        return "would let every web page that a user visits call the server; name each origin"
    if origin.lower() == "null":
        return "is the origin of files and sandboxed frames of anyone; serve the page from a host and name that"
    if not _ORIGIN.fullmatch(origin):
        return "is not an origin; write scheme://host or scheme://host:port in lower case, without a path"
    scheme, _, host = origin.partition("://")
    port = host.rpartition(":")[2] if not host.endswith("]") else ""
    if port == _DEFAULT_PORTS.get(scheme):
        return f"names the default port of {scheme}, which browsers omit; write {origin.removesuffix(f':{port}')}"
    return "has a port above 65535" if port.isdigit() and int(port) > 65535 else ""


def _refused(setting: str, message: str) -> ConfigError:
    return ConfigError(message, field="--" + setting.replace("_", "-"))
