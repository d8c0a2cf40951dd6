"""Keys and values of one fused projection into pages of 16."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, num_copies, print_report_header, report, shapes
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.attention import write_kv


def table(kernels: Kernels, device: torch.device) -> None:
    print_report_header("write_kv")
    for name, shape in shapes(device).items():
        for tokens in (1, 16, 256, 2048):
            num_bytes = 4 * tokens * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
            layers = num_copies(num_bytes, device)
            cache = torch.zeros(tokens + 1, layers, 2, shape.kv_heads, 16, shape.head_dim, device=device).to(
                shape.dtype
            )
            slots = (torch.randperm(tokens, device=device) + 1) * 16
            projection = torch.randn(tokens, shape.heads, shape.head_dim, device=device).to(shape.dtype)
            _, k, v = projection.split((shape.q_heads, shape.kv_heads, shape.kv_heads), dim=1)
            calls = [partial(write_kv.launch, k, v, cache, layer, slots) for layer in range(layers)]
            report(f"{name} tokens {tokens}", measure_us(calls, device), num_bytes, device)
