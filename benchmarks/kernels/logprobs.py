"""Log-probabilities of the chosen and the best ids from stored logits; the floor is reading the logits once."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.kernels.timing import measure_us, num_copies, print_report_header, report
from photon_grpc.kernels import Kernels
from photon_grpc.kernels.sampling.logprobs import MAX_GIVEN, LogprobMetadata

#: The best and the given ids of every row.
CASES = ((0, 0), (5, 0), (20, 0), (20, MAX_GIVEN))


def table(kernels: Kernels, device: torch.device) -> None:
    print_report_header("logprobs")
    for rows, tokens in ((1, 128256), (8, 128256), (64, 128256), (256, 128256)):
        if device.type == "cpu" and rows * tokens > 1 << 20:
            continue
        num_bytes = 4 * rows * tokens
        logits = [torch.randn(rows, tokens, device=device) * 3 for _ in range(num_copies(num_bytes, device))]
        ids = torch.randint(0, tokens, (rows,), device=device)
        given = torch.randint(0, tokens, (rows, MAX_GIVEN), dtype=torch.int32, device=device)
        for num_best, num_given in CASES:
            asked = (torch.full((rows,), number, device=device) for number in (num_best, num_given))
            metadata = LogprobMetadata(torch.arange(rows, device=device), *asked, given)
            calls = [partial(kernels.logprobs, each, ids, metadata) for each in logits]
            case = f"{rows} x {tokens} best {num_best} given {num_given}"
            report(case, measure_us(calls, device), num_bytes, device)
