"""The signature of a file, by which a change is detected."""

from __future__ import annotations

import os


def file_signature(path: str) -> tuple[int, ...]:
    """Return a value that differs after every change, also of a link's target; () if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
