"""Files of flags that are read again while the server runs, so that nothing in their place may block it."""

from __future__ import annotations

import os
import stat

#: An operator's file of keys or certificates; parsing one takes a second.
MAX_BYTES = 4 * 2**20


def read_regular_file(path: str) -> bytes:
    """Return the content. Raise OSError, also for a pipe, a device, and more than MAX_BYTES."""
    # Opening a pipe would wait for a writer; a device may have no end. Links are followed: Kubernetes has them.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "is not a regular file", path)
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(0, f"has more than {MAX_BYTES} bytes", path)
    return content
