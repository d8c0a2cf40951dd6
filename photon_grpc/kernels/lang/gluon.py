"""Gluon (Triton's layer with explicit layouts and memory), or nothing, as `jit.py` is for Triton.

Programmatic dependent launch, as the kernels of one decode layer use it: a kernel launched with `launch_pdl=True` may
start while the one before it still runs. It reads what an earlier kernel wrote only after `gdc_wait`, which returns
when that kernel is complete; weights depend on no kernel, so they are fetched before it. `gdc_launch_dependents` allows
the next one to start. Every kernel of a chain waits, even if it needs nothing from the kernel before: its end signals
the next one that everything before is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from photon_grpc.kernels.lang.jit import INTERPRETED, UNSPECIALIZED, Launchable, triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    gluon = gl = async_copy = mma_v2 = gdc_launch_dependents = gdc_wait = None
    fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = None


def constexpr_function(function: Callable[..., Any]) -> Any:
    """Return a function of compile-time values that kernels may call."""
    return function if gluon is None or triton is None else gluon.constexpr_function(function)


GluonKernel = None if gluon is None or triton is None else type("GluonKernel", (Launchable, GluonJITFunction), {})


def gluon_jit(function: Callable[..., Any]) -> Any:
    """Return a Gluon kernel or device function; the Python function itself where Gluon is missing."""
    return function if GluonKernel is None else GluonKernel(function, do_not_specialize=UNSPECIALIZED)


@functools.cache
def can_fuse(device: torch.device) -> bool:
    """Return whether fused kernels run here: CUDA with asynchronous copies and bf16 matrix units (sm_80 up)."""
    if gluon is None or INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Return whether fused kernels run here, and the device has Hopper's products of four warps (sm_90)."""
    return can_fuse(device) and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch (sm_90 up)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return arguments of a launch that may start before the last kernel ends; with PDL the kernel waits."""
    return {"PDL": True, "launch_pdl": True} if has_dependent_launch(device) else {"PDL": False}
