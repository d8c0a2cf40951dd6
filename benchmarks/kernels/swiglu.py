"""SwiGLU."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, num_copies, print_report_header, report, shapes
from photon_grpc.kernels import Kernels


def table(kernels: Kernels, device: torch.device) -> None:
    print_report_header("swiglu")
    for name, shape in shapes(device).items():
        for tokens in (1, 16, 256, 2048):
            num_bytes = 3 * tokens * shape.intermediate * shape.dtype.itemsize
            copies = num_copies(num_bytes, device)
            x = torch.randn(copies, tokens, 2 * shape.intermediate, device=device).to(shape.dtype)
            calls = [partial(kernels.swiglu, gate_up) for gate_up in x]
            report(f"{name} tokens {tokens}", measure_us(calls, device), num_bytes, device)
