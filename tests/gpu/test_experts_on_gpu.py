"""Experts on CUDA: routing, products and sums against float64, and the same bits at any number of tokens."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.config.quantization import FORMATS
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.moe import experts, route
from photon_grpc.kernels.moe.route import RouterForm, Routing
from photon_grpc.kernels.moe.stacks import Stack, Stacks
from tests.kernels.experts import check_work, exact, rounded

pytestmark = pytest.mark.gpu

#: Experts, intermediate size, hidden size, form.
SHAPES = {
    "qwen3-30b-a3b": (128, 768, 2048, RouterForm(8)),
    "medium": (8, 256, 512, RouterForm(2)),
    "uneven": (6, 200, 328, RouterForm(3, renormalises=False)),
}
TOKENS = (1, 2, 7, 8, 16, 17, 33, 64, 200, 513, 1000, 2500)
#: A shape, the dtype of its activations, the format of its weights.
CASES = [
    ("qwen3-30b-a3b", torch.bfloat16, ""),
    ("uneven", torch.float16, ""),
    ("uneven", torch.float32, ""),
    *(("medium", torch.bfloat16, name) for name in ("int8-g128", "int8", "int4-g128", "w8a8", "fp8", "fp8-block")),
]
each_case = pytest.mark.parametrize(("name", "dtype", "form"), CASES, ids=str)


class Case:
    def __init__(self, name: str, dtype: torch.dtype, num_tokens: int, form: str = "") -> None:
        num_experts, size, hidden, self.form = SHAPES[name]
        torch.manual_seed(7)
        options = {"dtype": dtype, "device": "cuda"}
        self.x = torch.randn(num_tokens, hidden, **options)
        self.router = torch.randn(num_experts, hidden, **options) * hidden**-0.5
        gate_up = torch.randn(num_experts, 2 * size, hidden, **options) * hidden**-0.5
        down = torch.randn(num_experts, hidden, size, **options) * size**-0.5
        self.stacks = Stacks(Stack(gate_up), Stack(down))
        if form:
            self.stacks = rounded(self.stacks, FORMATS[form], dtype)

    def route(self, x: torch.Tensor, num_real: int | None = None) -> Routing:
        real = None if num_real is None else torch.tensor([num_real], dtype=torch.int32, device="cuda")
        return route.launch(x, self.router, self.form, real)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return experts.launch(x, self.route(x), self.stacks)


@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_experts_of_a_bias_and_groups_are_those_of_torch(num_tokens: int) -> None:
    torch.manual_seed(8)
    x = torch.randn(num_tokens, 512, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(256, 512, dtype=torch.bfloat16, device="cuda") * 512**-0.5
    bias = torch.randn(256, device="cuda") * 0.1
    form = RouterForm(8, is_softmax=False, scale=2.5, groups=8, groups_taken=4, num_shared=1)
    found, expected = (
        route.launch(x, weight, form, None, None, bias),
        route.reference(x, weight, form, None, None, bias),
    )
    same = (found.experts == expected.experts).all(-1)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(found.weights[same], expected.weights[same], atol=1e-5, rtol=1e-4)
    check_work(found, 257)


@each_case
@pytest.mark.parametrize(("num_tokens", "num_real"), [(1, None), (16, 11), (64, 0), (700, 650), (2200, None)])
def test_routes_and_sums(name: str, dtype: torch.dtype, form: str, num_tokens: int, num_real: int | None) -> None:
    case = Case(name, dtype, num_tokens, form)
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
    if not case.stacks.down.is_eight:
        torch.testing.assert_close(out.double(), exact(case.x, found, case.stacks), atol=tolerance, rtol=tolerance)
    # A number that is rounded the other way to 8 bits is an eighth off.
    wanted = experts.reference(case.x, found, case.stacks).float()
    assert (out.float() - wanted).norm() <= 2e-2 * wanted.norm()


@each_case
def test_a_token_has_the_same_bits_at_any_number_of_tokens(name: str, dtype: torch.dtype, form: str) -> None:
    case = Case(name, dtype, max(TOKENS), form)
    whole = case(case.x)
    wrong = []
    for num_tokens in TOKENS:
        first = (37 * num_tokens) % (max(TOKENS) - num_tokens + 1)
        some = case.x[first : first + num_tokens].clone()
        found, expected = case(some), whole[first : first + num_tokens]
        rows = (found != expected).any(-1).nonzero().flatten().tolist()
        if rows:
            wrong.append((num_tokens, rows[:9], float((found - expected).abs().max()), int(found.isnan().sum())))
    assert wrong == [], f"again: {torch.equal(case(case.x), whole)}, NaN {int(whole.isnan().sum())}, {wrong}"


def test_sums_are_added_to_the_residual_stream() -> None:
    case = Case("qwen3-30b-a3b", torch.bfloat16, 33)
    h, routing = torch.randn_like(case.x), case.route(case.x)
    stream = ResidualStream(h.clone(), torch.empty(33, 2048 // 16, device="cuda"))
    experts.launch(case.x, routing, case.stacks, stream)
    assert torch.equal(stream.h, h + experts.launch(case.x, routing, case.stacks))
    assert torch.equal(stream.partial, squares.reference(stream.h))


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
