"""All kernels of a start compiled side by side before the first of them runs.

A dry run finds them: the code of the start on objects of its own, whose launches run nothing and ask for their
compilation. There is no list of kernels to keep: one that a step launches is found.

    with precompile_on_demand(dry_run, progress, num_workers=16):
        ...                 # the first kernel that is missing in Triton's cache is compiled, then all others by the dry run

Compilers run in forks rather than threads: more than a fifth of a compilation holds the interpreter's lock (Python that
makes the first IR, and the linking of libdevice), which 16 threads would spend their time waiting for. 85 kernels of
Llama-3.2-1B's shape beside an H200, 16 cores: 5.8 to 6.0 s in forks, 13.7 s in threads, the 1.4 s to find them
included; on two cores 27.7 and 34.6 s, 61.5 one after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from photon_grpc.kernels.forks import Job, OnProgress, run_in_forks
from photon_grpc.kernels.jit import DRY_RUN, INTERPRETED, triton

_LOG = logging.getLogger(__name__)


def precompile_on_demand(
    dry_run: Callable[[], None], progress: OnProgress, num_workers: int
) -> AbstractContextManager[None]:
    """While the block runs, the first kernel that has to be compiled has all others compiled as well; without one there
    is no dry run.

    Where the dry run fails, a warning says so and kernels are compiled one after the other, as they are met.

    Args:
        dry_run: everything that is computed before the first request, on objects of its own; waits for the device at
            its end, since nothing is to be under way when this process is forked.
        progress: of the compilations.
        num_workers: compile at a time.
    """
    return at_first_compilation(lambda: _precompile(dry_run, progress, num_workers))


def _precompile(dry_run: Callable[[], None], progress: OnProgress, num_workers: int) -> None:
    start_s = time.perf_counter()
    try:
        with launches_collected() as jobs:
            dry_run()
        torch.cuda.empty_cache()
        found_s = time.perf_counter() - start_s
        # The last found (heads of many rows, long steps) take longest and begin first.
        done = run_in_forks(jobs[::-1], num_workers=num_workers, progress=progress)
    except Exception as error:
        _LOG.warning("kernels are compiled one after the other (%s: %s)", type(error).__name__, error)
        return
    took_s = time.perf_counter() - start_s
    _LOG.info("%d of %d kernels compiled in %.1f s (%.1f s to find them)", done, len(jobs), took_s, found_s)


@contextmanager
def at_first_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Calls `callback` once, within the launch that had a kernel compiled.

    Never where nothing is missing in Triton's cache, and where Triton does not tell (before 3.4).
    """
    compilation = getattr(getattr(triton, "knobs", None), "compilation", None)
    if INTERPRETED or not hasattr(compilation, "listener"):
        yield
        return
    before = compilation.listener

    def listener(*, cache_hit: bool = True, **told: Any) -> None:
        if before is not None:
            before(cache_hit=cache_hit, **told)
        # Nothing that a capture forbids is done within one.
        if not cache_hit and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            compilation.listener = before
            callback()

    compilation.listener = listener
    try:
        yield
    finally:
        compilation.listener = before


@contextmanager
def launches_collected() -> Iterator[list[Job]]:
    """Every launch of a kernel of ours by this thread fills the list instead of the device, until the block ends; one
    job a kernel and specialisation, which compiles it into the cache on disk.

    What torch computes is computed, and must not be led astray by memory that no kernel has filled: new tensors are
    zeros. Raises AttributeError where Triton cannot hand compilations over (before 3.5).
    """
    jobs: list[Job] = []
    with triton.AsyncCompileMode(_Collector(jobs), ignore_errors=True), _Zeroed():
        before = DRY_RUN.set(True)
        try:
            yield jobs
        finally:
            DRY_RUN.reset(before)


class _Collector(Executor):
    """Runs nothing."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    def submit(self, job: Job, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._jobs.append(partial(_compile, job))
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("compiled elsewhere"))
        return future


def _compile(job: Job) -> None:
    kernel = job()
    # The function that hands over its arguments is C, compiled and cached as well. Where it is not, that happens at the
    # first launch.
    with suppress(Exception):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


class _Zeroed(TorchFunctionMode):
    """Fill what torch.empty and its like give with zeros."""

    _MAKERS = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in self._MAKERS else made
