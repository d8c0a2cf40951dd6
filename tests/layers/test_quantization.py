"""Weights quantized while a float checkpoint is read: the numbers, the products, the refusals, the memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.quantization import FORMATS, WeightFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels import select
from photon_grpc.kernels.linear.weight import QuantizedWeight, dequantize
from photon_grpc.layers.embedding import Embedding
from photon_grpc.layers.epilogues import Logits
from photon_grpc.layers.head import LMHead
from photon_grpc.layers.linear import Folded, Linear
from photon_grpc.layers.norm import RMSNorm
from photon_grpc.layers.parallel.linears import ColumnParallelLinear, RowParallelLinear
from photon_grpc.layers.quantization.embedding import QuantizedEmbedding
from photon_grpc.layers.quantization.methods import methods
from photon_grpc.models import build, load, weights
from tests.models import quantized, reference

CPU = torch.device("cpu")
OUTPUTS = {"q_proj": 256, "k_proj": 128}
COLUMNS = 256
WEIGHT_ONLY = ["int8", "int8-g32", "int8-g64", "int8-g128", "int4-g128"]
EIGHT_BITS = ["w8a8", "fp8", "fp8-block"]


@pytest.fixture(autouse=True)
def row_major(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights as a GPU has them: not packed for this CPU."""
    monkeypatch.setattr("photon_grpc.layers.quantization.weight_only.pack_quantized", lambda weight, bias: None)


def made(name: str, dtype: torch.dtype, change: Callable[[torch.Tensor], object] = lambda w: None) -> Any:
    """Return a loaded Linear behind a norm, its float weight with the norm's folded into it, and the norm."""
    torch.manual_seed(11)
    norm = RMSNorm("norm", COLUMNS, 1e-5, dtype=dtype, kernels=select("torch", "cpu"))
    norm.allocate(CPU)
    norm.weight.normal_(1.0, 0.2)
    linear = Linear(
        "p.", COLUMNS, OUTPUTS, bias=True, dtype=dtype, method=methods(FORMATS[name])("p.q_proj"), norm=norm
    )
    linear.allocate(CPU)
    for target in linear.targets():
        target.tensor.normal_(0, 0.3)
    linear.weight[7, :128] = 0.0
    change(linear.weight)
    weight = linear.weight * norm.weight
    linear.after_load()
    return linear, weight, norm


def by_formula(weight: torch.Tensor, form: WeightFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return W rounded and dequantized in float64, scale by scale."""
    limit = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[form.kind]
    whole = weight.double().clone()
    (rows, columns), (high, wide) = weight.shape, form.block
    for row, column in itertools.product(range(0, rows, high), range(0, columns, wide or columns)):
        block = whole[row : row + high, column : column + (wide or columns)]
        scale = (block.abs().max().float() / limit).to(dtype).double() or torch.tensor(1.0).double()
        if form.kind == "int4" and block.any():
            scale = least_error(block, dtype)
        # Divided in float32, whose quotients decide what is nearest.
        codes = (block.float() / scale.float()).clamp(-limit - (form.kind == "int4"), limit)
        exact = codes.to(torch.float8_e4m3fn).double() if form.kind == "fp8" else codes.round().double()
        block.copy_(exact * scale)
    return whole


def least_error(block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale of 4 bits with the least squared error, of five that suit their codes.

    The largest number has a negative code.
    """
    best, least = None, math.inf
    for share in (0.7, 0.78, 0.86, 0.93, 1.0):
        extreme = max(float(block.max()), float(block.min()), key=abs)
        first = -torch.tensor(extreme) * (share / 7.5)
        codes = (block.float() / first).round().clamp(-8, 7).double()
        scale = (float((block * codes).sum()) / float((codes * codes).sum())) * torch.ones(())
        scale = scale.to(dtype).double()
        found = (block.float() / scale.float()).round().clamp(-8, 7).double() * scale
        error = float((found - block).square().sum())
        if error < least:
            best, least = scale, error
    assert best is not None
    return best


def held(linear: Linear) -> torch.Tensor:
    """Return the dequantized weight, in the compute dtype where kernels dequantize, else in float32."""
    weight = linear.weight
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, linear.dtype)
    scales = weight.scales if weight.scales.shape[1] == len(weight.values) else weight.scales.repeat_interleave(128, 1)
    return weight.values.float() * scales.repeat_interleave(COLUMNS // len(scales), 0).t()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_a_weight_is_folded_and_rounded_to_nearest(name: str, dtype: torch.dtype) -> None:
    linear, weight, norm = made(name, dtype)
    assert torch.equal(norm.weight, torch.ones_like(norm.weight))
    assert torch.equal(held(linear), by_formula(weight, FORMATS[name], dtype).to(dtype))
    x = torch.randn(5, COLUMNS).to(dtype)
    assert torch.equal(linear(x, None), F.linear(x, held(linear), linear.bias))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_activations_and_weights_are_rounded_alike(name: str) -> None:
    form = FORMATS[name]
    linear, weight, _ = made(name, torch.float32)
    exact = by_formula(weight, form, torch.float32)
    torch.testing.assert_close(held(linear).double(), exact, rtol=1e-6, atol=0)
    x = torch.randn(6, COLUMNS)
    x[2] = 0.0
    columns = 128 if name == "fp8-block" else COLUMNS
    rows = by_formula(x, WeightFormat(form.kind, (1, columns)), torch.float32)
    expected = rows @ exact.t() + linear.bias.double()
    torch.testing.assert_close(linear(x, None).double(), expected, rtol=1e-5, atol=1e-5)


def test_sums_of_int8_are_exact_whatever_their_size() -> None:
    linear = Linear("p.", 5000, {"a": 3}, bias=False, dtype=torch.float32, method=methods(FORMATS["w8a8"])("p.a"))
    linear.allocate(CPU)
    linear.weight.copy_(torch.randint(-127, 128, (3, 5000)))
    linear.weight[:, 0] = 127.0
    whole = linear.weight.clone()
    linear.after_load()
    x = torch.randint(100, 128, (2, 5000)).float()
    x[:, 0] = 127.0
    assert torch.equal(linear(x, None), (x.double() @ whole.double().t()).float())


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_a_product_with_an_end_is_that_of_the_dequantized_weight(name: str) -> None:
    linear, _, _ = made(name, torch.float32)
    assert linear.method.fold(linear) is Folded.INTO_WEIGHT
    x = torch.randn(4, COLUMNS)
    product = linear.gemm(8, Logits())
    torch.testing.assert_close(product(x), x @ held(linear).t())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ModelLoadError, match=r"p\.k_proj\.weight: holds NaN or infinite numbers"):
        made(name, torch.bfloat16, lambda weight: weight[300, 9].fill_(value))


@pytest.mark.parametrize(
    ("name", "columns", "outputs", "said"),
    [
        ("int8-g64", 96, {"a": 8}, r"p\.a: 96 input features are not a multiple of the 64 columns of a group"),
        ("int4-g128", 192, {"a": 8}, r"p\.a: 192 input features are not a multiple of the 128 columns of a group"),
        ("fp8-block", 100, {"a": 128, "b": 96}, r"p\.b: 96 output features are not a multiple of the 128 rows"),
    ],
)
def test_sizes_that_do_not_suit_a_format_are_refused(
    name: str, columns: int, outputs: dict[str, int], said: str
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        Linear("p.", columns, outputs, bias=False, dtype=torch.float32, method=methods(FORMATS[name])("p.a"))


class Two:
    rank, size = 1, 2

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_part_holds_whole_blocks(kind: Any) -> None:
    form = WeightFormat("fp8", (128, 128), 8, layout="fp8")
    side = "output" if kind is ColumnParallelLinear else "input"
    problem = f"p.a: 64 of 128 {side} features, the part of a rank or a shared expert, are not a multiple of the 128"
    with pytest.raises(ModelLoadError, match=problem):
        kind("p.", 128, {"a": 128}, bias=False, dtype=torch.float32, method=methods(form)("p.a"), group=Two())


def peak_bytes(run: Callable[[], object], mapped: int) -> int:
    """Return the most bytes that torch held at a time beyond those of the beginning and a mapped file of that size."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes if not 0 <= mapped - abs(change) < 8192))


@pytest.mark.parametrize("name", ["int8-g64", "int4-g128", "fp8"])
def test_the_peak_of_loading_is_the_quantized_weights_and_one_float_leaf(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photon_grpc.layers.quantization.rounding._PARTS", {"cpu": 1 << 10})
    monkeypatch.setattr("photon_grpc.layers.unquantized.pack", lambda weight, bias: None)
    config = read_model_dir(reference.save(quantized.make_model(), tmp_path))
    decoder = build(
        config, dtype=torch.bfloat16, device="cpu", kernels=select("torch", "cpu"), max_model_len=32,
        method=methods(FORMATS[name]),
    )  # fmt: skip
    peak = peak_bytes(lambda: load(decoder, config), (tmp_path / quantized.FILE).stat().st_size)
    quantized_bytes, _ = weights.linear_bytes(decoder)
    kept = sum(
        target.tensor.nbytes for leaf in decoder.leaves() for target in leaf.targets() if leaf is not decoder.head
    )
    largest = max(leaf.num_parameters for leaf in decoder.leaves()) * 2
    scratch = 64 << 10
    assert peak <= quantized_bytes + kept + largest + scratch
    floats = 2 * decoder.num_parameters
    assert quantized_bytes + kept + largest + scratch < floats


@pytest.mark.parametrize("factor", [None, 4.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_quantized_embedding_are_rounded_and_a_tied_head_has_the_same_tensors(
    dtype: torch.dtype, factor: float | None
) -> None:
    form = replace(FORMATS["int8-g64"], head="int8", embedding="int8")
    plain = Embedding("model.embed_tokens.weight", 300, 64, dtype=dtype)
    plain.factor = factor
    embedding = QuantizedEmbedding(plain, methods(form)("model.embed_tokens"))
    head = LMHead(
        "lm_head", embedding, tied=True, method=methods(form)("lm_head"), sample=select("torch", "cpu").sample
    )
    for leaf in (embedding, head):
        leaf.allocate(CPU)
    (target,) = embedding.targets()
    assert (target.name, *target.tensor.shape) == ("model.embed_tokens.weight", 300, 64)
    target.tensor.normal_(0, 0.3)
    floats = target.tensor.double()
    for leaf in (embedding, head):
        leaf.after_load()
    scales = (target.tensor.float().abs().amax(1) / 127).to(dtype).double()
    rounded = ((floats / scales[:, None]).round().clamp(-127, 127) * scales[:, None]).to(dtype)
    ids = torch.tensor([299, 0, 7, 7], dtype=torch.int32)
    context: Any = None
    assert torch.equal(embedding(ids, context), rounded[ids] if factor is None else rounded[ids] * factor)
    assert head.weight.values.data_ptr() == embedding.weight.values.data_ptr()
    x = torch.randn(3, 64).to(dtype)
    torch.testing.assert_close(head.logits(x).double(), x.double() @ rounded.double().t(), rtol=2e-2, atol=2e-2)
