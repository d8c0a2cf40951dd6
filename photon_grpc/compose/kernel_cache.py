"""A directory for compiled kernels if Triton cannot write to its default one in the home directory.

The home of a container with a read-only root is not writable, and a container with an arbitrary uid (OpenShift) often
has none; Triton would fail at the first kernel, or write below a directory called `~`.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile

from photon_grpc.errors import ConfigError
from photon_grpc.runner.kernel_cache import VARIABLE, directory

log = logging.getLogger(__name__)


def ensure_writable() -> None:
    """Set TRITON_CACHE_DIR to a temporary directory if Triton's is not writable. Raise ConfigError if neither is."""
    chosen = directory()
    if _is_writable(chosen):
        return
    try:
        os.environ[VARIABLE] = own = _own_directory()
    except OSError as error:
        problem = f"kernels cannot be cached in {chosen} or in a temporary directory ({error})"
        raise ConfigError(f"{problem}; set {VARIABLE} to a writable one", field="kernels") from None
    log.warning("kernels are cached in %s, since %s is not writable; set %s to choose", own, chosen, VARIABLE)


def _is_writable(path: str) -> bool:
    try:
        if os.path.isabs(path):
            os.makedirs(path, exist_ok=True)
        return os.path.isabs(path) and os.access(path, os.W_OK | os.X_OK)
    except OSError:
        return False


def _own_directory() -> str:
    """Return the same directory at every start, unless another user owns it: its contents are executed."""
    path = os.path.join(tempfile.gettempdir(), f"photon-grpc-kernels-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return tempfile.mkdtemp(prefix="photon-grpc-kernels-")
    return path
