"""Sampling from what filters keep, from logits to ids, by the kernels and, once, by sorting.

The floor is reading the logits once.

Logits are normal; deviations are of logits / temperature. A nucleus is what top_p leaves of a row on average.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, num_copies, print_report_header, report
from photon_grpc.kernels import TORCH, Kernels
from photon_grpc.kernels.sampling import topk_topp
from photon_grpc.kernels.sampling.histogram import Filters
from photon_grpc.kernels.sampling.sample import SamplingMetadata

TEMPERATURE = 0.8
# top_k, top_p, min_p, and the standard deviation: the flatter, the more tokens a nucleus has.
CASES = {
    "top_p 0.95": (-1, 0.95, 0.0, 3.0),
    "top_p 0.9": (-1, 0.9, 0.0, 3.0),
    "top_k 50": (50, 1.0, 0.0, 3.0),
    "top_k 1000": (1000, 1.0, 0.0, 3.0),
    "top_k 50 top_p 0.95": (50, 0.95, 0.0, 3.0),
    "min_p 0.05": (-1, 1.0, 0.05, 3.0),
    "temperature alone": (-1, 1.0, 0.0, 3.0),
    "flat: top_p 0.95": (-1, 0.95, 0.0, 1.13),
    "very flat: top_p 0.95": (-1, 0.95, 0.0, 0.01),
    "peaked: top_p 0.95": (-1, 0.95, 0.0, 6.0),
}


def table(kernels: Kernels, device: torch.device) -> None:
    print_report_header("sample_filtered")
    # A row's name has the size of its nucleus, which should be the same in every run.
    torch.manual_seed(0)
    for rows, tokens in ((1, 4096), (1, 128256), (8, 128256), (64, 128256), (256, 128256)):
        if device.type == "cpu" and rows * tokens > 1 << 20:
            continue
        copies = num_copies(4 * rows * tokens, device)
        normal = [torch.randn(rows, tokens, device=device) for _ in range(copies)]
        for name, (top_k, top_p, min_p, deviation) in CASES.items():
            filters = Filters(*(torch.full((rows,), value, device=device) for value in (top_k, top_p, min_p)))
            logits = [each * (deviation * TEMPERATURE) for each in normal]
            case = f"{rows} x {tokens} {name}"
            if top_p < 1.0:
                case += f", nucleus {nucleus(logits[0], filters):.0f}"
            kinds = {"": kernels.sample_filtered} | ({"sort: ": TORCH.sample_filtered} if name == "top_p 0.95" else {})
            for kind, sample in kinds.items():
                calls = [partial(sample, each, metadata(rows, device), filters) for each in logits]
                report(kind + case, measure_us(calls, device), 4 * rows * tokens, device)


def metadata(rows: int, device: torch.device) -> SamplingMetadata:
    """Return rows in different slots."""
    number = torch.arange(rows, device=device)
    return SamplingMetadata(number, number + 9, torch.full((rows,), TEMPERATURE, device=device), number, number, number)


def nucleus(logits: torch.Tensor, filters: Filters) -> float:
    """Return the tokens that a row keeps on average."""
    few = slice(8)
    scaled = logits[few] / TEMPERATURE
    return float(
        (scaled >= topk_topp.reference(scaled, *(each[few] for each in filters))[:, None]).sum(-1).double().mean()
    )
