"""Experts on CUDA: routing, products and sums against float64, and the same bits at any number of tokens."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.moe import experts, route
from photon_grpc.kernels.moe.route import RouterForm, Routing
from photon_grpc.kernels.moe.stacks import Stack, Stacks
from tests.kernels.experts import check_work, exact

pytestmark = pytest.mark.gpu

#: Experts, intermediate size, hidden size, form.
SHAPES = {
    "qwen3-30b-a3b": (128, 768, 2048, RouterForm(8)),
    "mixtral": (8, 1792, 1024, RouterForm(2)),
    "uneven": (6, 200, 328, RouterForm(3, renormalises=False)),
}
TOKENS = (1, 2, 7, 8, 16, 17, 33, 64, 200, 512, 1000, 2500)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Case:
    def __init__(self, name: str, dtype: torch.dtype, num_tokens: int) -> None:
        num_experts, size, hidden, self.form = SHAPES[name]
        torch.manual_seed(7)
        options = {"dtype": dtype, "device": "cuda"}
        self.x = torch.randn(num_tokens, hidden, **options)
        self.router = torch.randn(num_experts, hidden, **options) * hidden**-0.5
        gate_up = torch.randn(num_experts, 2 * size, hidden, **options) * hidden**-0.5
        down = torch.randn(num_experts, hidden, size, **options) * size**-0.5
        self.stacks = Stacks(Stack(gate_up), Stack(down))

    def route(self, x: torch.Tensor, num_real: int | None = None) -> Routing:
        real = None if num_real is None else torch.tensor([num_real], dtype=torch.int32, device="cuda")
        return route.launch(x, self.router, self.form, real)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return experts.launch(x, self.route(x), self.stacks)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_real"), [(1, None), (16, 11), (64, 0), (700, 650)])
def test_routes_and_sums(name: str, dtype: torch.dtype, num_tokens: int, num_real: int | None) -> None:
    case = Case(name, dtype, num_tokens)
    if num_real is not None:
        case.x[num_real:] = torch.nan
    found = case.route(case.x, num_real)
    real = None if num_real is None else torch.tensor([num_real], device="cuda")
    expected = route.reference(case.x.double().float(), case.router, case.form, real)
    same = (found.experts == expected.experts).all(-1)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(found.weights[same], expected.weights[same], atol=1e-5, rtol=1e-4)
    check_work(found, SHAPES[name][0])
    out = experts.launch(case.x, found, case.stacks)
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), exact(case.x, found, case.stacks), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_at_any_number_of_tokens(name: str, dtype: torch.dtype) -> None:
    case = Case(name, dtype, max(TOKENS))
    whole = case(case.x)
    for num_tokens in TOKENS:
        first = (37 * num_tokens) % (max(TOKENS) - num_tokens + 1)
        some = case.x[first : first + num_tokens].clone()
        assert torch.equal(case(some), whole[first : first + num_tokens]), num_tokens


def test_one_token_that_is_nan_fails_alone_and_a_graph_replays_another_routing() -> None:
    case = Case("qwen3-30b-a3b", torch.bfloat16, 8)
    x, expected = case.x.clone(), case(case.x)
    case(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case(x)
    for shift in (0, 3, 5):
        x.copy_(case.x.roll(shift, 0))
        graph.replay()
        assert torch.equal(out, expected.roll(shift, 0))
    x.copy_(case.x)
    x[2, 5] = torch.nan
    graph.replay()
    assert out[2].isnan().all()
    others = [row for row in range(8) if row != 2]
    assert torch.equal(out[others], expected[others])
