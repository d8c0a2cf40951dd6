"""Counters by which the last program of a kernel to finish is known."""

from __future__ import annotations

import functools

import torch


def counters_of(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Return the counters of the kernels that read a weight: int32, zero before and after each of them.

    Models of one program may run side by side, as when one is loaded while another serves, so weights share none.
    """
    return _counters(weight.data_ptr(), weight.device, size)


@functools.cache
def _counters(address: int, device: torch.device, size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)
