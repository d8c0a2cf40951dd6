"""Linear, head and embedding: merged, packed and folded, they compute what torch computes apart."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from photon_grpc.kernels import select
from photon_grpc.layers.context import StepContext
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.linear import Folded, Linear, LinearMethod
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parameter_owner import Target
from photon_grpc.layers.prepacked import (
    ColumnWeight,
    HalfWeight,
    SmallTiledWeight,
    TiledWeight,
    multiplies_half,
    multiplies_tiles,
    pack,
)
from photon_grpc.layers.unquantized import Unquantized

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def fill(leaf: Any) -> dict[str, torch.Tensor]:
    """Allocate and fill every target at random; return the values by name."""
    leaf.allocate(CPU)
    filled = {}
    for target in leaf.targets():
        target.tensor.normal_(0, 0.3)
        filled[target.name] = target.tensor.clone()
    return filled


@pytest.fixture(params=[True, False], ids=["packed", "row-major"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Compute in both ways, if this machine has both."""
    if not request.param:
        monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17, 130])
def test_merged_projections_equal_separate_ones(packing: bool, dtype: torch.dtype, bias: bool, num_tokens: int) -> None:
    outputs = {"q_proj": 40, "k_proj": 24, "v_proj": 8}
    linear = Linear("attn.", 36, outputs, bias=bias, dtype=dtype, method=Unquantized())
    weights = fill(linear)
    linear.after_load()
    x = torch.randn(num_tokens, 36).to(dtype)
    y = linear(x, None)
    assert y.dtype == dtype
    for name, part in zip(outputs, y.split(list(outputs.values()), dim=1), strict=True):
        b = weights[f"attn.{name}.bias"].float() if bias else None
        expected = F.linear(x.float(), weights[f"attn.{name}.weight"].float(), b)
        torch.testing.assert_close(part.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_targets_are_named_and_shaped_as_in_the_checkpoint() -> None:
    linear = Linear("mlp.", 6, {"gate_proj": 4, "up_proj": 3}, bias=True, dtype=torch.float32, method=Unquantized())
    assert [(target.name, tuple(target.tensor.shape)) for target in linear.targets()] == [
        ("mlp.gate_proj.weight", (4, 6)),
        ("mlp.gate_proj.bias", (4,)),
        ("mlp.up_proj.weight", (3, 6)),
        ("mlp.up_proj.bias", (3,)),
    ]


def test_folding_a_norm_changes_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)
    norm = RMSNorm("norm", 24, 1e-5, dtype=torch.float32, kernels=select("torch", "cpu"))
    outputs = {"a": 16, "b": 8}
    linear = Linear("", 24, outputs, bias=True, dtype=torch.float32, method=Unquantized(), norm=norm)
    fill(norm)
    fill(linear)
    x = torch.randn(5, 24)
    expected = linear(norm(x), None)
    assert linear.method.fold(linear) is Folded.INTO_WEIGHT
    assert torch.equal(norm.weight, torch.ones(24))
    torch.testing.assert_close(linear(norm(x), None), expected)


def test_no_memory_is_allocated_before_it_is_requested() -> None:
    linear = Linear("", 2**20, {"huge": 2**30}, bias=False, dtype=torch.float32, method=Unquantized())
    assert all(target.tensor.is_meta for target in linear.targets())


FORMS = [
    (ColumnWeight, torch.float32),
    (SmallTiledWeight, torch.float32),
    *((TiledWeight, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *((HalfWeight, dtype) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=lambda value: str(getattr(value, "__name__", value)))
@pytest.mark.parametrize("bias", [False, True])
def test_every_packed_form_that_this_cpu_has_computes_the_product(form: type, dtype: torch.dtype, bias: bool) -> None:
    if not (multiplies_half() if form is HalfWeight else form is ColumnWeight or multiplies_tiles(dtype)):
        pytest.skip("this CPU or build has no such product")
    weight, b = torch.randn(40, 36).to(dtype), torch.randn(40).to(dtype) if bias else None
    packed = form(weight, b)
    for num_tokens in (0, 1, 3, 17):
        x = torch.randn(num_tokens, 36).to(dtype)
        expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
        assert packed(x).dtype == dtype
        torch.testing.assert_close(packed(x).double(), expected, atol=tolerance, rtol=tolerance)
        assert packed.logits(x).dtype == torch.float32
        torch.testing.assert_close(packed.logits(x).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not multiplies_half(), reason="this build has no such product")
def test_a_bfloat16_weight_in_half_precision_gives_unrounded_logits() -> None:
    weight = (torch.randn(64, 128) * 0.02).bfloat16()
    x = torch.randn(5, 128).bfloat16()
    torch.testing.assert_close(
        HalfWeight(weight, None).logits(x).double(), x.double() @ weight.double().t(), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("value", [70000.0, torch.inf, torch.nan])
def test_a_weight_that_float16_cannot_hold_is_not_packed_into_it(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("photon_grpc.layers.prepacked.multiplies_tiles", lambda dtype: False)
    weight = torch.ones(8, 8, dtype=torch.bfloat16)
    weight[3, 5] = value
    assert pack(weight, None) is None


@pytest.mark.skipif(not multiplies_tiles(torch.float32), reason="this build cannot pack weights")
def test_packing_releases_the_weight_it_replaces() -> None:
    linear = Linear("", 64, {"o_proj": 64}, bias=False, dtype=torch.float32, method=Unquantized())
    fill(linear)
    before = weakref.ref(linear.weight)
    linear.after_load()
    gc.collect()
    assert not isinstance(linear.weight, torch.Tensor)
    assert before() is None


class Ternary(LinearMethod):
    """A method of our own: signs in int8 and one scale, to show that a Linear asks nothing else."""

    def create(self, linear: Linear, device: torch.device) -> None:
        linear.weight = {
            "signs": torch.empty(linear.out_features, linear.in_features, dtype=torch.int8, device=device),
            "scale": torch.empty(1, device=device),
        }

    def targets(self, linear: Linear) -> Iterator[Target]:
        for name, rows in linear.slices():
            yield Target(name + ".signs", linear.weight["signs"][rows])
        yield Target(linear.prefix + "scale", linear.weight["scale"])

    def after_load(self, linear: Linear) -> None:
        linear.weight = linear.weight["signs"].float() * linear.weight["scale"]

    def apply(self, linear: Linear, x: torch.Tensor, ctx: StepContext | None) -> torch.Tensor:
        return x @ linear.weight.t()


def test_another_quantization_method_needs_no_change_of_linear() -> None:
    linear = Linear("p.", 3, {"a": 1, "b": 1}, bias=False, dtype=torch.float32, method=Ternary())
    linear.allocate(CPU)
    values = {"p.a.signs": [[1, -1, 0]], "p.b.signs": [[0, 1, 1]], "p.scale": [0.5]}
    for target in linear.targets():
        target.tensor.copy_(torch.tensor(values[target.name]))
    linear.after_load()
    assert linear(torch.tensor([[1.0, 2.0, 3.0]]), None).tolist() == [[-0.5, 2.5]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_and_embedding(packing: bool, tied: bool, dtype: torch.dtype) -> None:
    embedding = Embedding("embed.weight", 70, 32, dtype=dtype)
    head = LMHead("head", embedding, tied=tied, method=Unquantized(), sample=select("torch", "cpu").sample)
    weights = fill(embedding) | fill(head)
    embedding.after_load()
    head.after_load()
    assert weights.keys() == {"embed.weight"} | (set() if tied else {"head.weight"})

    ids = torch.tensor([3, 69, 0, 3])
    x = embedding(ids, StepContext(ids, ()))
    assert torch.equal(x, weights["embed.weight"][ids])
    logits = head.logits(x)
    assert logits.dtype == torch.float32
    expected = F.linear(x.float(), weights["embed.weight" if tied else "head.weight"].float())
    torch.testing.assert_close(logits, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
