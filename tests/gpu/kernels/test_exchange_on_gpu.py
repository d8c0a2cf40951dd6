"""The exchange of parts, with two ranks on one GPU: each launches on a stream of its own, and waits for the other."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import exchange

pytestmark = pytest.mark.gpu


def load_kernels(inboxes: tuple[torch.Tensor, ...], bias: torch.Tensor | None, num_rows: int) -> None:
    """Launch each kernel once where nothing waits: loading one waits until the device is idle."""
    hidden = inboxes[0].shape[-1]
    h, part, sums = (torch.zeros(num_rows, size, device="cuda") for size in (hidden, hidden, hidden // 16))
    for rank in range(2):
        for plane in range(exchange.NUM_PLANES):
            for inbox in inboxes:
                inbox.zero_()
            exchange.launch(h.bfloat16(), part, bias, sums, tuple(inbox[plane] for inbox in inboxes), rank)
            torch.cuda.synchronize()
    for inbox in inboxes:
        inbox.fill_(exchange.EMPTY)


# Both ranks' programs must be on the device at a time, so that rows are few here.
@pytest.mark.parametrize("num_rows", [1, 3, 8, 64])
@pytest.mark.parametrize("hidden", [2048, 4096])
@pytest.mark.parametrize("has_bias", [False, True])
def test_two_ranks_add_the_same_sum(num_rows: int, hidden: int, has_bias: bool) -> None:
    inboxes = tuple(torch.full((2, 1, 64, hidden), exchange.EMPTY, dtype=torch.int32, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]
    bias = torch.randn(hidden, device="cuda", dtype=torch.bfloat16) if has_bias else None
    load_kernels(inboxes, bias, num_rows)
    for turn in range(40):
        torch.manual_seed(turn)
        parts = torch.randn(2, num_rows, hidden, device="cuda")
        start = torch.randn(num_rows, hidden, device="cuda").bfloat16()
        expected = start.clone()
        exchange.reference(expected, parts, bias)
        found = [(start.clone(), torch.empty(num_rows, hidden // 16, device="cuda")) for _ in range(2)]
        torch.cuda.synchronize()
        for rank, (stream, (h, sums)) in enumerate(zip(streams, found, strict=True)):
            with torch.cuda.stream(stream):
                exchange.launch(h, parts[rank], bias, sums, tuple(inbox[turn % 2] for inbox in inboxes), rank)
        torch.cuda.synchronize()
        for h, sums in found:
            assert torch.equal(h, expected)
            assert torch.equal(sums, squares.reference(expected))
    assert all(bool((inbox == exchange.EMPTY).all()) for inbox in inboxes)
