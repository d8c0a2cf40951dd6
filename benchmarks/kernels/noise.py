"""Gumbel noise for a whole vocabulary and for the tokens that a filter kept."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, report
from photon_grpc.kernels import TORCH, Kernels
from photon_grpc.kernels.sampling import noise


def table(kernels: Kernels, device: torch.device) -> None:
    make = noise.reference if kernels is TORCH else noise.launch
    for rows, tokens in ((1, 4096), (16, 4096), (1, 128256), (64, 128256)):
        if device.type == "cpu" and rows * tokens > 1 << 20:
            continue
        words = [torch.arange(rows, device=device) for _ in range(3)]
        calls = [partial(make, *words, tokens)]
        report("gumbel_noise", f"rows {rows} tokens {tokens}", measure_us(calls, device), 4 * rows * tokens, device)
    for rows, kept in ((1, 64), (16, 64)):
        ids = torch.randint(0, 4096, (rows, kept), device=device)
        calls = [partial(make, *(torch.arange(rows, device=device) for _ in range(3)), ids)]
        report("gumbel_noise", f"rows {rows} kept {kept}", measure_us(calls, device), 12 * rows * kept, device)
