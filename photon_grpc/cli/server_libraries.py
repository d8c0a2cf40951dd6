"""The libraries that a server needs and a client does not."""

from __future__ import annotations

import importlib.util

from photon_grpc.config.flags import ServerConfig
from photon_grpc.errors import StartupError

#: The extra `serve` installs them; the client works without them.
SERVER_LIBRARIES = (
    *("torch", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec"),
    *("grpc_reflection", "prometheus_client"),
)
#: The extra `http` installs them, for --http-listen.
HTTP_LIBRARIES = ("starlette", "uvicorn", "httptools")
HTTP_ADVICE = "pip install '.[http]' in the clone"


def need_server() -> None:
    """Raise StartupError if only the client is installed."""
    if missing := _missing(SERVER_LIBRARIES):
        raise StartupError(
            f"only the client is installed ({', '.join(missing)} missing): pip install '.[serve]' in the clone"
        )


def need_http(server: ServerConfig) -> None:
    """Raise StartupError if the HTTP server is asked for and its libraries are not installed."""
    if server.http_listen and (missing := missing_for_http()):
        raise StartupError(f"--http-listen needs more libraries ({', '.join(missing)} missing): {HTTP_ADVICE}")


def advice_on_page() -> str:
    """Return why there is no page, and what to install for it."""
    return f"no page and no HTTP ({', '.join(missing_for_http())} missing): {HTTP_ADVICE}"


def missing_for_http() -> list[str]:
    """Return the libraries of the HTTP server that are not installed."""
    return _missing(HTTP_LIBRARIES)


def _missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]
