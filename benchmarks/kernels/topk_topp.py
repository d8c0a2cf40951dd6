"""What filters keep, by the kernels and by sorting; the floor is reading the logits once."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, num_copies, report
from photon_grpc.kernels import TORCH, Kernels
from photon_grpc.kernels.sampling import topk_topp

# top_k, top_p, min_p, and the standard deviation of the logits: the flatter, the more tokens a nucleus has.
CASES = {
    "top_k 50": (50, 1.0, 0.0, 3.0),
    "top_k 1000": (1000, 1.0, 0.0, 3.0),
    "top_p 0.9": (-1, 0.9, 0.0, 3.0),
    "top_p 0.9 flat": (-1, 0.9, 0.0, 1.0),
    "top_p 0.9 one bin": (-1, 0.9, 0.0, 0.01),
    "top_k 50 top_p 0.9": (50, 0.9, 0.0, 3.0),
    "min_p 0.05": (-1, 1.0, 0.05, 3.0),
    "off": (-1, 1.0, 0.0, 3.0),
}


def table(kernels: Kernels, device: torch.device) -> None:
    for rows, tokens in ((1, 4096), (1, 128256), (64, 128256), (256, 128256)):
        if device.type == "cpu" and rows * tokens > 1 << 20:
            continue
        num_bytes = 4 * rows * tokens
        logits = [torch.randn(rows, tokens, device=device) for _ in range(num_copies(num_bytes, device))]
        for name, (top_k, top_p, min_p, deviation) in CASES.items():
            options = [torch.full((rows,), value, device=device) for value in (top_k, top_p, min_p)]
            scaled = [each * deviation for each in logits]
            kinds = {"sort: ": topk_topp.reference} | ({} if kernels is TORCH else {"": topk_topp.launch})
            for kind, threshold in kinds.items():
                calls = [partial(threshold, each, *options) for each in scaled]
                case = f"{kind}{rows} x {tokens} {name}"
                report("topk_topp", case, measure_us(calls, device), num_bytes, device)
