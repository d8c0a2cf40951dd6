"""From the host to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from photon_grpc.runner.streams import launching_on, stream_of

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int | float]]


def to_device(values: Numbers, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host, as many dimensions as they are nested. On CUDA it travels from pinned memory, in order with
    what is launched."""
    return tensor_to_device(torch.tensor(values, dtype=dtype), device)


def tensor_to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the same for a tensor. One in pinned memory is not copied on the host and must not change until it has
    travelled."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class SideCopy:
    """Copies from the host into memory of a device, again and again, beside what is launched in between.

    What reads the copy is launched behind it. The next one waits for whatever was launched before `follow` was called
    last, so that the readers of this one have ended by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._is_read = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Let the next copy wait for what is launched so far."""
        if self._is_read is not None:
            self._is_read.record(stream_of(self._device))

    def __call__(self, host: torch.Tensor, to: torch.Tensor) -> None:
        """Copy. What is launched from here on waits for it. `host` must not change until it has travelled."""
        if self._stream is None or self._is_read is None:
            to.copy_(host)
            return
        self._stream.wait_event(self._is_read)
        with launching_on(self._stream) as reader:
            to.copy_(host.pin_memory(), non_blocking=True)
        reader.wait_stream(self._stream)


def host_memory(num_bytes: int, device: torch.device) -> memoryview:
    """Memory that travels to this device without a copy on the host."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    return memoryview(host.numpy())


def array_to_device(values: npt.NDArray[np.int16] | npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Return the same for an array."""
    dtype = torch.int16 if values.dtype == np.int16 else torch.int32
    host = torch.empty(values.shape, dtype=dtype, pin_memory=device.type != "cpu")
    host.numpy()[...] = values
    return host.to(device, non_blocking=True)
