"""From the host to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int | float]]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host, as many dimensions as they are nested. On CUDA it travels from pinned memory, in order with
    what is launched."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def array_to_device(values: npt.NDArray[np.int16] | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """The same for an array."""
    dtype = torch.int16 if values.dtype == np.int16 else torch.int32
    host = torch.empty(values.shape, dtype=dtype, pin_memory=device.type != "cpu")
    host.numpy()[...] = values
    return host.to(device, non_blocking=True)
