"""The libraries that a server needs and a client does not."""

from __future__ import annotations

import importlib.util

from photon_grpc.errors import StartupError

#: The extra `serve` installs them; the client works without them.
SERVER_LIBRARIES = (
    *("torch", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec"),
    *("grpc_reflection", "prometheus_client"),
)


def need_server() -> None:
    """Raise StartupError if only the client is installed."""
    missing = [name for name in SERVER_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(
            f"only the client is installed ({', '.join(missing)} missing): pip install '.[serve]' in the clone"
        )
