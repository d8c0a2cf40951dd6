"""Copies from the host to the device that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from photon_grpc.kernels.lang.streams import launching_on, stream_of

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int | float]]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy (nested) numbers of the host; on CUDA from pinned memory, in order with other launches."""
    return tensor_to_device(torch.tensor(values, dtype=dtype), device)


def tensor_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor as `to_device` does.

    One in pinned memory is not copied on the host and must not change until it has travelled.
    """
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def fill_columns(to: torch.Tensor, rows: Sequence[Sequence[int]]) -> None:
    """Copy numbers of the host to the first columns of `to`, int64 and contiguous, as `to_device` does.

    All of `to` travels, in one copy; what is behind these columns is undefined.
    """
    host = torch.empty(to.shape, dtype=torch.int64, pin_memory=to.is_cuda)
    host.numpy()[:, : len(rows[0])] = rows
    to.copy_(host, non_blocking=True)


class SideCopy:
    """Repeated copies from the host into memory of a device, beside other launches.

    Readers of a copy are launched after it. The next copy waits for everything launched before the last call of
    `follow`, so that the readers have ended by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_read = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Make the next copy wait for everything launched so far."""
        if self._is_read is not None:
            self._is_read.record(stream_of(self._device))

    def __call__(self, host: torch.Tensor, to: torch.Tensor) -> None:
        """Copy; later launches wait for it. `host` must not change until it has travelled."""
        if self._stream is None or self._is_read is None:
            to.copy_(host)
            return
        self._stream.wait_event(self._is_read)
        with launching_on(self._stream) as reader:
            to.copy_(host.pin_memory(), non_blocking=True)
        reader.wait_stream(self._stream)


def host_memory(num_bytes: int, device: torch.device) -> memoryview:
    """Return memory that can be copied to this device without a staging copy (pinned on CUDA)."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return memoryview(host.numpy())


def array_to_device(values: npt.NDArray[np.int16] | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Copy an array as `to_device` does."""
    dtype = torch.int16 if values.dtype == np.int16 else torch.int32
    host = torch.empty(values.shape, dtype=dtype, pin_memory=device.type != "cpu")
    host.numpy()[...] = values
    return host.to(device, non_blocking=True)
