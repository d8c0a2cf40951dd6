"""Experts in Triton's interpreter: the choice, the work list, the products, against torch and float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from photon_grpc.config.quantization import FORMATS
from photon_grpc.kernels import rms_norm
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import quantize
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.moe import experts, route
from photon_grpc.kernels.moe.route import RouterForm, StreamNorm
from photon_grpc.kernels.moe.segment_work import gathered
from photon_grpc.kernels.moe.stacks import Stack, Stacks
from tests.kernels.experts import check_work, exact, rounded

FORMS = [RouterForm(2), RouterForm(3, renormalises=False), RouterForm(1, is_softmax=False), RouterForm(8)]
#: Of a rank that has some of the experts.
FORMS += [RouterForm(3, first_kept=5, num_kept=5), RouterForm(8, first_kept=0, num_kept=4)]
FORMS += [RouterForm(3, scale=1.5, num_shared=2), RouterForm(2, first_kept=5, num_kept=5, num_shared=1)]


def numbers(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.each_value
@pytest.mark.parametrize("groups", [(0, 0), (4, 2), (2, 1)])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_of_a_bias_and_groups_are_those_of_torch(groups: tuple[int, int], num_tokens: int) -> None:
    x, weight, bias = numbers(1, num_tokens, 40), numbers(2, 12, 40), numbers(3, 12, scale=0.5)
    form = RouterForm(3, is_softmax=False, groups=groups[0], groups_taken=groups[1], num_shared=1)
    found, expected = (
        route.launch(x, weight, form, None, None, bias),
        route.reference(x, weight, form, None, None, bias),
    )
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)
    if groups[0]:
        size = 12 // groups[0]
        assert all(len(set(row)) <= groups[1] for row in (found.experts[:, :3] // size).tolist())
    check_work(found, 13)


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_tokens", "num_real"), [(1, None), (5, None), (33, 20), (4, 0)])
def test_routes_are_those_of_torch(form: RouterForm, num_tokens: int, num_real: int | None) -> None:
    x, weight = numbers(1, num_tokens, 40), numbers(2, 10, 40)
    real = None if num_real is None else torch.tensor([num_real], dtype=torch.int32)
    tallies = torch.zeros(2, 4, dtype=torch.int64)
    for _ in range(2):  # The counters are zero again.
        found, expected = (
            of(x, weight, form, real, tally) for of, tally in zip((route.launch, route.reference), tallies, strict=True)
        )
        assert torch.equal(*tallies)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)
        check_work(found, (form.num_kept or 10) + form.num_shared)


def test_a_norm_before_the_router_is_computed_with_its_numbers() -> None:
    h, weight, factors = numbers(1, 21, 48), numbers(2, 10, 48), numbers(3, 48)
    norm = StreamNorm(squares.reference(h), factors, 1e-6, torch.empty_like(h))
    found = route.launch(h, weight, RouterForm(3), None, norm=norm)
    torch.testing.assert_close(norm.y, rms_norm.reference(h, factors, 1e-6), atol=1e-6, rtol=1e-5)
    expected = route.launch(norm.y, weight, RouterForm(3), None)
    assert torch.equal(found.experts, expected.experts)
    assert torch.equal(found.weights, expected.weights)


@pytest.mark.parametrize(
    ("kind", "grouped", "num_tokens"),
    [*((kind, grouped, 9) for kind in quantize.LIMITS for grouped in (False, True)), (torch.int8, False, 1)],
    ids=str,
)
def test_a_router_leaves_its_rows_in_8_bits_as_a_kernel_behind_it_does(
    kind: torch.dtype, grouped: bool, num_tokens: int
) -> None:
    h, weight, factors = numbers(1, num_tokens, 336).half(), numbers(2, 10, 336).half(), numbers(3, 336).half()
    h[0] *= 3e-3
    h[1:2], h[2:3, 5], h[3:4, 200] = 0, torch.nan, torch.inf
    partial, rows = squares.reference(h), quantize.memory_for(h, kind, grouped=grouped)
    norm = StreamNorm(partial, factors, 1e-6, torch.empty_like(h))
    # The third finds the counter of programs zero again.
    expected, *found = (route.launch(h, weight, RouterForm(3), None, norm=norm, rows=of) for of in (None, rows, rows))
    for one in found:
        assert torch.equal(one.experts, expected.experts)
        torch.testing.assert_close(one.weights, expected.weights, rtol=0.0, atol=0.0, equal_nan=True)
    behind = quantize.launch(norm.y, kind, grouped=grouped)
    assert torch.equal(rows.values.view(torch.uint8), behind.values.view(torch.uint8))
    torch.testing.assert_close(rows.scales, behind.scales, rtol=0.0, atol=0.0, equal_nan=True)


def test_experts_that_every_token_reaches_are_added_last() -> None:
    x, router, stacks = made(9, 7, 24, 40)
    routing = route.launch(x, router[:5], RouterForm(2, num_shared=2), torch.tensor([8], dtype=torch.int32))
    assert routing.experts[:8, 2:].tolist() == [[5, 6]] * 8 and routing.experts[8].tolist() == [-1] * 4
    assert (routing.weights[:8, 2:] == 1).all()
    found = experts.launch(x, routing, stacks)
    torch.testing.assert_close(found.double(), exact(x, routing, stacks), atol=1e-5, rtol=1e-5)


def test_of_equal_numbers_the_lower_expert_is_chosen_and_nan_fails_its_token_alone() -> None:
    x = numbers(1, 4, 16)
    x[1] = 0.0
    x[2, 3] = torch.nan
    weight = numbers(2, 6, 16)
    weight[5] = weight[0]
    for route_of in (route.launch, route.reference):
        found = route_of(x, weight, RouterForm(6), None)
        assert found.experts[1].tolist() == found.experts[2].tolist() == list(range(6))
        assert found.weights[2].isnan().all()
        assert not found.weights[[0, 1, 3]].isnan().any()
        for token in (0, 3):
            order = found.experts[token].tolist()
            assert order.index(5) == order.index(0) + 1


def test_the_experts_that_ranks_keep_are_those_of_one() -> None:
    x, weight = numbers(1, 7, 40), numbers(2, 10, 40)
    x[3, 5] = torch.nan
    whole = route.launch(x, weight, RouterForm(4), None)
    halves = [route.launch(x, weight, RouterForm(4, first_kept=first, num_kept=5), None) for first in (0, 5)]
    for token in range(7):
        pairs = zip(whole.experts[token].tolist(), whole.weights[token].tolist(), strict=True)
        for place, (expert, weight_of) in enumerate(pairs):
            half, other = halves[expert // 5], halves[1 - expert // 5]
            assert half.experts[token, place] == expert % 5
            assert weight_of != weight_of or half.weights[token, place] == weight_of
            assert other.experts[token, place] == -1 and other.weights[token, place] == 0


def made(num_tokens: int, num_experts: int, size: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, Stacks]:
    x, router = numbers(3, num_tokens, hidden), numbers(4, num_experts, hidden)
    gate_up = numbers(5, num_experts, 2 * size, hidden, scale=hidden**-0.5)
    return x, router, Stacks(Stack(gate_up), Stack(numbers(6, num_experts, hidden, size, scale=size**-0.5)))


@pytest.mark.each_value
@pytest.mark.parametrize(("num_tokens", "num_real"), [(1, None), (7, 5), (40, None)])
@pytest.mark.parametrize(("size", "hidden"), [(24, 40), (48, 64)])
def test_sums_of_experts_are_those_of_float64(num_tokens: int, num_real: int | None, size: int, hidden: int) -> None:
    x, router, stacks = made(num_tokens, 6, size, hidden)
    if num_real is not None:
        x[num_real:] = torch.nan
    real = None if num_real is None else torch.tensor([num_real], dtype=torch.int32)
    routing = route.launch(x, router, RouterForm(2), real)
    found = experts.launch(x, routing, stacks)
    torch.testing.assert_close(found.double(), exact(x, routing, stacks), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(experts.reference(x, routing, stacks), found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_rows_and_their_scales_are_brought_together_in_the_order_of_the_list(groups: int) -> None:
    x, router, _ = made(37, 5, 24, 32)
    routing = route.launch(x, router, RouterForm(3), torch.tensor([35], dtype=torch.int32), block=16)
    values = torch.randint(-128, 128, (37, 40), dtype=torch.int8)
    scales = (None, numbers(1, 37), numbers(1, 3, 40)[:, :37].t())[min(groups, 2)]
    found, found_scales = gathered(values, scales, routing)
    check_work(routing, 5)
    work = routing.work
    assert work is not None
    for entry in range(int(work.size)):
        first, row = int(work.first[entry]), int(work.row[entry])
        pairs = work.pairs[work.expert[entry], first : min(first + 16, int(work.count[entry]))]
        place = slice(row, row + len(pairs))
        assert torch.equal(found[place], values[pairs // 3])
        if scales is not None and found_scales is not None:
            assert torch.equal(found_scales[place], scales[pairs // 3])


def test_all_tokens_may_reach_one_expert() -> None:
    x, router, stacks = made(40, 5, 24, 32)
    router.zero_()
    routing = route.launch(x, router, RouterForm(1), None)
    assert set(routing.experts.flatten().tolist()) == {0}
    found = experts.launch(x, routing, stacks)
    torch.testing.assert_close(found.double(), exact(x, routing, stacks), atol=1e-5, rtol=1e-5)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    # The interpreter's products are those of a library, whose order of sums depends on the size of a tile.
    x, router, stacks = made(16, 6, 24, 32)
    form = RouterForm(3)
    together = experts.launch(x, route.launch(x, router, form, None), stacks)
    for some in (slice(0, 1), slice(3, 14), slice(15, 16)):
        alone = experts.launch(x[some].contiguous(), route.launch(x[some].contiguous(), router, form, None), stacks)
        assert torch.equal(alone, together[some])


@pytest.mark.parametrize(("num_tokens", "num_real"), [(1, None), (9, 6)])
def test_sums_are_added_to_the_residual_stream(num_tokens: int, num_real: int | None) -> None:
    x, router, stacks = made(num_tokens, 6, 24, 48)
    real = None if num_real is None else torch.tensor([num_real], dtype=torch.int32)
    routing = route.launch(x, router, RouterForm(2), real)
    streams = [ResidualStream(numbers(8, num_tokens, 48), torch.empty(num_tokens, 3)) for _ in range(2)]
    before = streams[0].h.clone()
    experts.launch(x, routing, stacks, streams[0])
    experts.reference(x, routing, stacks, streams[1])
    for found, expected in zip(*streams, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    # The interpreter's products are those of a library, and those of one token have a tile of their own.
    tolerance = 1e-6 if num_tokens == 1 else 0.0
    torch.testing.assert_close(
        streams[0].h, before + experts.launch(x, routing, stacks), atol=tolerance, rtol=tolerance
    )
    assert torch.equal(streams[0].partial, squares.reference(streams[0].h))


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int8-g128", "int4-g128", "w8a8", "zeros"])
@pytest.mark.parametrize("num_tokens", [3, pytest.param(20, marks=pytest.mark.full)])
def test_products_with_weights_of_8_and_4_bits_are_those_of_torch(name: str, num_tokens: int) -> None:
    form = replace(FORMATS["int4-g128"], has_zeros=True) if name == "zeros" else FORMATS[name]
    # Two groups of 128 in a row of gate and up.
    x, router, floats = made(num_tokens, 3, 128, 256 if name.endswith("g128") else 128)
    dtype = torch.float32
    stacks = rounded(floats, form, dtype)
    routing = route.launch(x, router, RouterForm(2), None)
    found, expected = experts.launch(x, routing, stacks), experts.reference(x, routing, stacks)
    # An activation of 8 bits may be rounded the other way.
    tolerance = 0.02 if form.activation_bits == 8 else 1e-4
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
