"""Files of flags that are read again while the server runs, so that nothing in their place may block it."""

from __future__ import annotations

from pathlib import Path

#: An operator's file of keys or certificates; parsing one takes a second.
MAX_BYTES = 4 * 2**20


def read_regular_file(path: str) -> bytes:
    """Return the content. Raise OSError, also for a pipe, a device, and more than MAX_BYTES."""
    # A pipe would block the open, a device may have no end.
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise OSError(0, "is not a regular file", path)
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(0, f"has more than {MAX_BYTES} bytes", path)
    return content
