"""The API key of the verbs that call a server: a variable, since others on the machine can read a command line."""

from __future__ import annotations

import os


def key_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata of every call: the key in PHOTON_API_KEY, or nothing."""
    key = os.environ.get("PHOTON_API_KEY", "")
    return (("authorization", f"Bearer {key}"),) if key else ()
