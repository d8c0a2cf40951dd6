"""RMSNorm with the residual sum."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, num_copies, print_report_header, report, shapes
from photon_grpc.kernels import Kernels


def table(kernels: Kernels, device: torch.device) -> None:
    print_report_header("add_rms_norm")
    for name, shape in shapes(device).items():
        weight = torch.ones(shape.hidden, dtype=shape.dtype, device=device)
        for tokens in (1, 16, 256, 2048):
            num_bytes = 4 * tokens * shape.hidden * shape.dtype.itemsize
            copies = num_copies(num_bytes, device)
            x = torch.randn(copies, 2, tokens, shape.hidden, device=device).to(shape.dtype)
            calls = [partial(kernels.add_rms_norm, a, b, weight, 1e-5) for a, b in x]
            report(f"{name} tokens {tokens}", measure_us(calls, device), num_bytes, device)
