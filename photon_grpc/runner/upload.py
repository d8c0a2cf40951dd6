"""From the host to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int | float]]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host, as many dimensions as they are nested. On CUDA it travels from pinned memory, in order with what is launched."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
