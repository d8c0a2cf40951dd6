"""A place for compiled kernels, also where Triton's own choice is none: a home that is read-only or that there is not.

A container whose root is read-only has no home to write to, and one that runs as any uid (OpenShift) often has none at
all; Triton would fail at the first kernel, or write below a directory called `~`.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile

from photon_grpc.errors import ConfigError

log = logging.getLogger(__name__)

_VARIABLE = "TRITON_CACHE_DIR"


def ensure_writable() -> None:
    """Set TRITON_CACHE_DIR to a directory of this user's below the temporary one, with a warning, where Triton's cache
    cannot be written. Raise ConfigError where that cannot be, either."""
    chosen = os.environ.get(_VARIABLE) or _default()
    if _is_writable(chosen):
        return
    try:
        os.environ[_VARIABLE] = own = _own_directory()
    except OSError as error:
        problem = f"kernels have no place to be cached: neither {chosen} nor a temporary directory ({error})"
        raise ConfigError(f"{problem}; set {_VARIABLE}", field="kernels") from None
    log.warning("kernels are cached in %s, since %s cannot be written: set %s", own, chosen, _VARIABLE)


def _default() -> str:
    """Triton's choice; without a home it begins with `~`."""
    return os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")


def _is_writable(path: str) -> bool:
    try:
        if os.path.isabs(path):
            os.makedirs(path, exist_ok=True)
        return os.path.isabs(path) and os.access(path, os.W_OK | os.X_OK)
    except OSError:
        return False


def _own_directory() -> str:
    """Return the same at every start. What lies there is run, so another user's is not taken."""
    path = os.path.join(tempfile.gettempdir(), f"photon-grpc-kernels-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return tempfile.mkdtemp(prefix="photon-grpc-kernels-")
    return path
