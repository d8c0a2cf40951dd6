"""The libraries that a server needs and a client does not."""

from __future__ import annotations

import importlib.util

from photon_grpc.errors import StartupError

#: Of the extra `serve`; the client side installs without them.
SERVER_LIBRARIES = (
    *("torch", "numpy", "safetensors", "tokenizers", "jinja2", "msgspec"),
    *("grpc_reflection", "prometheus_client"),
)


def need_server() -> None:
    """Raise StartupError where the client side alone is installed."""
    missing = [name for name in SERVER_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise StartupError(
            f"the client side alone is installed ({', '.join(missing)} missing): pip install '.[serve]' in the clone"
        )
