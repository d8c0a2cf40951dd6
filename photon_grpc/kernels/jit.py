"""Triton, or nothing: the one place that knows whether it is installed.

    from photon_grpc.kernels.jit import jit, launches, tl

Where Triton is missing, `triton` and `tl` are None and `jit` returns the function as it is, so that every kernel file
imports everywhere; its launcher then answers with the file's torch reference.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

# Triton decides at decoration, so this is as late as it can be read.
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


#: Arguments that change from step to step. Triton compiles a kernel of its own where a number is 1 or a multiple of 16.
UNSPECIALIZED = ["num_rows", "table_stride"]

#: Every kernel and device function that was made, Gluon's too.
KERNELS: list[Any] = []


def jit(function: Callable[..., Any]) -> Any:
    """A Triton kernel or device function; the Python function itself where Triton is missing."""
    if triton is None:
        return function
    KERNELS.append(triton.jit(function, do_not_specialize=UNSPECIALIZED))
    return KERNELS[-1]


#: What remembers that it has launched kernels.
ONCE: list[Any] = []


def once(function: Callable[..., None]) -> Any:
    """functools.cache of a function that launches kernels; forgotten where launches ran nothing."""
    ONCE.append(functools.cache(function))
    return ONCE[-1]


def launches(tensor: torch.Tensor) -> bool:
    """Whether a kernel can run on this tensor: a CUDA tensor, or any tensor under Triton's interpreter."""
    return triton is not None and (tensor.is_cuda or INTERPRETED)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
