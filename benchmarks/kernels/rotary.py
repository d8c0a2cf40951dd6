"""Rotary embedding of the queries and keys of one fused projection."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, num_copies, print_report_header, report, shapes
from photon_grpc.kernels import Kernels


def table(kernels: Kernels, device: torch.device) -> None:
    print_report_header("rotary")
    for name, shape in shapes(device).items():
        cos, sin = torch.randn(2, 4096, shape.head_dim // 2, device=device)
        for tokens in (1, 16, 256, 2048):
            positions = torch.randint(0, 4096, (tokens,), device=device)
            num_bytes = 2 * tokens * (shape.q_heads + shape.kv_heads) * shape.head_dim * shape.dtype.itemsize
            copies = num_copies(num_bytes, device)
            x = torch.randn(copies, tokens, shape.heads, shape.head_dim, device=device).to(shape.dtype)
            calls = []
            for projection in x:
                q, k, _ = projection.split((shape.q_heads, shape.kv_heads, shape.kv_heads), dim=1)
                calls.append(partial(kernels.rotary, q, k, cos, sin, positions))
            report(f"{name} tokens {tokens}", measure_us(calls, device), num_bytes, device)
