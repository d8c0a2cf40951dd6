"""What is computed before the first request, gone through once without running a kernel, so that all of them are compiled side by side.

Only where kernels are missing in Triton's cache: the first that has to be compiled starts the rehearsal, and what follows finds the others
compiled. A rehearsal that fails is a warning; then they are compiled one after the other, as they are met.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch

from photon_grpc.kernels.precompile import OnProgress, at_first_compilation, compile_side_by_side, launches_collected
from photon_grpc.models.decoder import Decoder, DecoderLayer
from photon_grpc.runner.graphs import Replay

_LOG = logging.getLogger(__name__)


def rehearse_on_demand(
    play: Callable[[], None], progress: OnProgress, num_workers: int
) -> AbstractContextManager[None]:
    """While the block runs, the first kernel that has to be compiled has all others compiled as well.

    Args:
        play: everything that is computed before the first request, on objects of its own; waits for the device at its end, since nothing
            is to be under way when this process is forked.
        progress: of the compilations.
        num_workers: compile at a time.
    """
    return at_first_compilation(lambda: _rehearse(play, progress, num_workers))


def _rehearse(play: Callable[[], None], progress: OnProgress, num_workers: int) -> None:
    start_s = time.perf_counter()
    try:
        with launches_collected() as jobs:
            play()
        torch.cuda.empty_cache()
        played_s = time.perf_counter() - start_s
        # What is found last (heads of many rows, long steps) takes longest and is to begin first.
        done = compile_side_by_side(jobs[::-1], num_workers=num_workers, progress=progress)
    except Exception as error:
        _LOG.warning("kernels are compiled one after the other (%s: %s)", type(error).__name__, error)
        return
    took_s = time.perf_counter() - start_s
    _LOG.info("%d of %d kernels compiled in %.1f s (%.1f s to find them)", done, len(jobs), took_s, played_s)


def call_once(function: Callable[[], torch.Tensor]) -> Replay:
    """A Capture that captures nothing: the function is called, its replay does nothing."""
    ids = function()
    return lambda: None, ids


def one_layer_of_each_kind(decoder: Decoder) -> Decoder:
    """The decoder without layers that are made as an earlier one is, which launch the same kernels; the cache keeps its shape."""
    short = copy.copy(decoder)
    kinds = {_kind(layer): layer for layer in reversed(decoder.layers)}
    short.layers = tuple(layer for layer in decoder.layers if kinds[_kind(layer)] is layer)
    return short


def _kind(layer: DecoderLayer) -> tuple[Hashable, ...]:
    """Types, shapes and numbers of everything that owns weights; what is text there is names of weights."""
    return tuple((type(leaf), *map(_trait, vars(leaf).values())) for leaf in layer.leaves())


def _trait(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, *value.shape
    return value if isinstance(value, int | float) else type(value)
