"""Timing of kernels: the clock, the shapes, the floors a time is set against, and the tables of what was measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from photon_grpc.kernels.lang.gluon import can_fuse

# What one H200 reached: torch's copy kernel (read + write), a bf16 product of 8192³.
BYTES_PER_SECOND = 4.28e12
FLOPS_PER_SECOND = 792e12
# Inputs are taken in turn from so many bytes that the second-level cache (50 MB) holds none of the next call's.
ROTATED_BYTES = 400 << 20


@dataclass(frozen=True)
class Shape:
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    dtype: torch.dtype

    @property
    def heads(self) -> int:
        """Heads in one token's fused projection."""
        return self.q_heads + 2 * self.kv_heads


def shapes(device: torch.device) -> dict[str, Shape]:
    """Return the models to measure on this device."""
    small = Shape(2048, 32, 8, 64, 8192, torch.bfloat16)
    if device.type == "cpu":
        return {"demo": Shape(256, 4, 2, 64, 768, torch.float32), "1B": small}
    return {"1B": small, "8B": Shape(4096, 32, 8, 128, 14336, torch.bfloat16)}


def num_copies(num_bytes: int, device: torch.device) -> int:
    """Return how many sets of inputs to take in turn if one call moves `num_bytes`."""
    return 1 if device.type == "cpu" else max(2, min(32, ROTATED_BYTES // max(1, num_bytes)))


def measure_us(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int = 9) -> float:
    """Return median microseconds of one call: replays of a CUDA graph of all of them, wall time on a CPU."""
    if device.type == "cpu":
        return wall_us(calls[0])
    graph = captured(calls)
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times[1:])[repeats // 2]


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Capture all of them in one graph; the first was called before."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def wall_us(call: Callable[[], object]) -> float:
    call()
    times = []
    started = time.perf_counter()
    while len(times) < 5 or (len(times) < 200 and time.perf_counter() - started < 0.3):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return sorted(times)[len(times) // 2]


def needs_gpu(what: str, device: str = "cuda") -> None:
    """End the program with one line where the kernels of fused layers do not run."""
    if not (torch.cuda.is_available() and can_fuse(torch.device(device))):
        sys.exit(f"{what} needs a CUDA GPU of compute capability 8.0 or more, and Triton")


def print_header(name: str, *columns: str) -> None:
    """Print the header of a table whose rows differ in their first cell."""
    print(f"\n## {name}\n\n| case | {' | '.join(columns)} |\n|---|{'--:|' * len(columns)}", flush=True)


def print_report_header(name: str) -> None:
    """Print the header of the rows that `report` prints."""
    print_header(name, "µs", "floor µs", "of the floor %", "TFLOP/s")


def report(
    case: str,
    us: float,
    num_bytes: float,
    device: torch.device,
    flops: float = 0.0,
    bytes_per_second: float = BYTES_PER_SECOND,
) -> None:
    """Print one row: time, and on a GPU the floor of bytes or products and the part of it that was reached."""
    cells = ["–", "–", "–"]
    if device.type == "cuda":
        floor_us = max(num_bytes / bytes_per_second, flops / FLOPS_PER_SECOND) * 1e6
        cells = [f"{floor_us:.2f}", f"{100 * floor_us / us:.1f}", f"{flops / us / 1e6:.0f}" if flops else "–"]
    print(f"| {case} | {us:.2f} | {' | '.join(cells)} |", flush=True)
