"""Triton, or nothing: the one place that knows whether it is installed.

    from photon_grpc.kernels.lang.jit import jit, launches, tl

Where Triton is missing, `triton` and `tl` are None and `jit` returns the function as it is, so that every kernel file
imports everywhere; its launcher then answers with the file's torch reference.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

# Triton decides at decoration, so it cannot be read later.
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


#: Arguments that change from step to step. Triton compiles a separate kernel if a number is 1 or a multiple of 16.
UNSPECIALIZED = ["num_rows", "num_tokens", "num_lanes", "table_stride"]

#: Whether launches of this thread run nothing and only request their compilation.
DRY_RUN: ContextVar[bool] = ContextVar("dry_run", default=False)
#: Called in this thread before a kernel of ours is compiled, or read from Triton's cache on disk. Triton's own hook
#: does not work for kernels whose constants are functions.
BEFORE_COMPILATION: ContextVar[Callable[[], None]] = ContextVar("before_compilation", default=lambda: None)


class Launchable:
    """Triton's kernel, whose launches obey the two variables above; mixed into JITFunction."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=DRY_RUN.get(), **kwargs)

    def _do_compile(self, *args: Any, **kwargs: Any) -> Any:
        BEFORE_COMPILATION.get()()
        return super()._do_compile(*args, **kwargs)


def compiled_once(kernel: Any, known: set[Any], key: Any, calls: Iterable[tuple[Any, ...]], **options: Any) -> None:
    """Compile a kernel for other arguments than it is launched with now, which later launches may have.

    known: the keys for which that was done in this process. A dry run, which launches nothing, requests it every time.
    """
    if key in known and not DRY_RUN.get():
        return
    for arguments in calls:
        kernel.run(*arguments, grid=(1,), warmup=True, **options)
    if not DRY_RUN.get():
        known.add(key)


TritonKernel = None if triton is None else type("TritonKernel", (Launchable, triton.JITFunction), {})


def jit(function: Callable[..., Any]) -> Any:
    """Return a Triton kernel or device function; the Python function itself where Triton is missing."""
    if TritonKernel is None:
        return function
    kernel = triton.jit if INTERPRETED else TritonKernel
    return kernel(function, do_not_specialize=UNSPECIALIZED)


def once(function: Callable[..., None]) -> Any:
    """Cache a function that launches kernels, except in a dry run, which launches nothing."""
    cached = functools.cache(function)

    @functools.wraps(cached)
    def launched_once(*args: Any) -> None:
        (function if DRY_RUN.get() else cached)(*args)

    launched_once.cache_clear = cached.cache_clear
    return launched_once


def launches(tensor: torch.Tensor) -> bool:
    """Return whether a kernel can run on this tensor: a CUDA tensor, or any tensor under Triton's interpreter."""
    return triton is not None and (tensor.is_cuda or INTERPRETED)


def counters_of(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Return counters of the kernels that read a weight, zero before and after each; models side by side share none.

    Raises:
        RuntimeError: while a CUDA graph is captured, more are needed than were reserved before.
    """
    return _counters(weight.data_ptr(), weight.device, size)


@functools.cache
def _counters(address: int, device: torch.device, size: int) -> torch.Tensor:
    return _reserve(device).take(size)


@functools.cache
def _reserve(device: torch.device) -> CounterReserve:
    return CounterReserve(device)


class CounterReserve:
    """Counters that are zero before any graph is captured.

    A layer may ask for its counters for the first time during a capture. Memory allocated then belongs to the graphs,
    whose replays write to it, and its fill with zeros would be a node of that graph only.
    """

    # Of one capture: 128 layers with five weights of 800 counters. 4 MiB.
    SIZE = 1 << 20
    # Counters of two weights share no line of the L2 cache, 128 bytes.
    _LINE = 32

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rest = torch.empty(0, dtype=torch.int32, device=device)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` zeros, int32, which no other call returns."""
        is_captured = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not is_captured and self._rest.numel() < self.SIZE // 2:
            self._rest = torch.zeros(self.SIZE, dtype=torch.int32, device=self._device)
        whole = cdiv(size, self._LINE) * self._LINE
        if whole > self._rest.numel():
            raise RuntimeError(f"a captured layer needs {whole} counters, and {self._rest.numel()} are left")
        taken, self._rest = self._rest[:size], self._rest[whole:]
        return taken


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a CUDA device; the interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def num_shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a CUDA device; none elsewhere."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
