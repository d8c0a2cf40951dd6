"""Triton's import, a quarter of a second, in a process that will not launch its kernels."""

from __future__ import annotations

import os
import sys

from photon_grpc.config.flags import DeviceConfig


def skip_triton(device: DeviceConfig) -> None:
    """Make Triton appear missing in this process if it computes on a CPU. Call it before `kernels` is imported."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    # With --kernels triton the error names the device, not a missing package.
    if not is_interpreted and device.kernels != "triton" and (device.device == "cpu" or not _has_cuda()):
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
