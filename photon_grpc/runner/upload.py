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
    return tensor_to_device(torch.tensor(values, dtype=dtype), device)


def tensor_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same for a tensor. One in pinned memory is not copied on the host and must not change until it has
    travelled."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def host_memory(num_bytes: int, device: torch.device) -> memoryview:
    """Memory that travels to this device without a copy on the host."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return memoryview(host.numpy())


def array_to_device(values: npt.NDArray[np.int16] | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """The same for an array."""
    dtype = torch.int16 if values.dtype == np.int16 else torch.int32
    host = torch.empty(values.shape, dtype=dtype, pin_memory=device.type != "cpu")
    host.numpy()[...] = values
    return host.to(device, non_blocking=True)
