"""The exchange of parts, with two ranks on one GPU: each launches on a stream of its own, and waits for the other."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import exchange, head
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.fused_linear import Affine
from photon_grpc.kernels.linear.tiles import bucket
from photon_grpc.layers.unquantized import _choose

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


@pytest.mark.parametrize(("num_rows", "k"), [(1, 2048), (8, 7168), (33, 2048), (64, 7168), (128, 2048)])
def test_products_push_the_sums_that_they_leave(num_rows: int, k: int) -> None:
    hidden, size, rows = 4096, 2, bucket(num_rows)
    inboxes = tuple(
        torch.full((2, 1, 128, hidden), exchange.EMPTY, dtype=torch.int32, device="cuda") for _ in range(size)
    )
    slices = num_slices(hidden, k)
    tile = _choose(torch.device("cuda", 0), Product(hidden, k, rows, 0, "head", slices), False)
    counters = torch.zeros(hidden // 16, dtype=torch.int32, device="cuda")
    for turn in range(4):
        torch.manual_seed(turn)
        xs = [torch.randn(rows, k, device="cuda").bfloat16()[:num_rows] for _ in range(size)]
        linears = [Affine(torch.randn(hidden, k, device="cuda").bfloat16() / 64, None, slices) for _ in range(size)]
        if turn == 3:
            linears[0].w[5, :] = float("nan")
        start = torch.randn(num_rows, hidden, device="cuda").bfloat16()
        parts = [
            head.push_launch(x, linear, tile, counters, (inboxes[1 - rank][turn % 2, 0],))
            for rank, (x, linear) in enumerate(zip(xs, linears, strict=True))
        ]
        for part, x, linear in zip(parts, xs, linears, strict=True):
            assert torch.equal(part.nan_to_num(), head.logits_launch(x, linear, tile, counters).nan_to_num())
        expected = start.clone()
        exchange.reference(expected, torch.stack(parts), None)
        plane = tuple(inbox[turn % 2] for inbox in inboxes)
        for rank in range(size):
            found, sums = start.clone(), torch.empty(num_rows, hidden // 16, device="cuda")
            exchange.launch(found, parts[rank], None, sums, plane, rank, pushes=False)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
            torch.testing.assert_close(sums, squares.reference(expected), rtol=0, atol=0, equal_nan=True)
    assert all(bool((inbox == exchange.EMPTY).all()) for inbox in inboxes)
