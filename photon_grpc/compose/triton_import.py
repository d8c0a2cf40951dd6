"""Triton's import, a quarter of a second, in a process that will not launch its kernels."""

from __future__ import annotations

import importlib
import os
import sys

from photon_grpc.config.flags import DeviceConfig


def skip_triton(device: DeviceConfig) -> None:
    """Make Triton appear missing in this process if it computes on a CPU. Call it before `kernels` is imported."""
    # Without torch where the flag says so.
    on_cpu = device.device == "cpu" or not importlib.import_module("torch").cuda.is_available()
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    # With --kernels triton the error names the device, not a missing package.
    if on_cpu and not is_interpreted and device.kernels != "triton":
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
