"""Signature of a file: tells whether it has changed since it was read."""

from __future__ import annotations

import os


def file_signature(path: str) -> tuple[int, ...]:
    """Another one after every change, also of a link to another file; () where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
