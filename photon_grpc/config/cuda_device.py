"""Whether `--device cuda` can work, found out without importing torch."""

from __future__ import annotations

import subprocess
import sys

from photon_grpc.errors import ConfigError

NO_CUDA = "--device cuda: there is no CUDA device that torch can use; use --device cpu or auto"

#: Asks the driver in a process of its own, since a driver stays loaded. Exit code 0: there is a device.
_ASK_DRIVER = """
import ctypes, sys
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
sys.exit(bool(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value))
"""
_TIMEOUT_S = 60


def check_device(device: str) -> None:
    """Raise ConfigError if `device` is "cuda" and torch is built without CUDA, or the driver finds no device."""
    if device == "cuda" and (_is_built_for_cpu() or not _has_device()):
        raise ConfigError(NO_CUDA, field="--device")


def _is_built_for_cpu() -> bool:
    # Loads a dozen modules, which the supervisor would keep.
    from importlib import metadata

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:  # built from source
        return False


def _has_device() -> bool:
    command = [sys.executable, "-S", "-E", "-c", _ASK_DRIVER]
    try:
        return (
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S).returncode == 0
        )
    except subprocess.TimeoutExpired:
        return True  # a slow driver; the engine will see
