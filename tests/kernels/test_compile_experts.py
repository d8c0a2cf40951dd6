"""The kernels of experts, compiled ahead of time for sm_90 at the shapes of real models."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from photon_grpc.kernels.linear import many_rows
from photon_grpc.kernels.linear.weight import WeightKind
from photon_grpc.kernels.linear.wide8_sums import box_layout
from photon_grpc.kernels.moe import down_alone, experts, route, segments, segments8
from photon_grpc.kernels.moe.choose import choose_kernel
from photon_grpc.kernels.moe.experts import ExpertStream
from photon_grpc.kernels.moe.products import RowOperand, StackOperand
from photon_grpc.kernels.moe.route import RouterForm, StreamNorm, WorkList
from photon_grpc.kernels.moe.segment_work import SegmentProblem, gather_kernel
from photon_grpc.kernels.moe.stacks import Stack
from tests.kernels.test_compile import NAMES, Compiled, check, compiled, kept_report
from tests.kernels.test_compile_fused import compiled_gluon

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

#: Experts, top_k, intermediate size, hidden size.
MODELS = {"qwen3-30b-a3b": (128, 8, 768, 2048), "mixtral-8x7b": (8, 2, 14336, 4096)}
WORK = WorkList(*("*i32",) * 6)
each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def choice_types() -> dict[str, Any]:
    types = {"scores": "*fp32", "bias": None, "num_real": "*i32", "experts": "*i32", "weights": "*fp32", "work": WORK}
    return types | {"counters": "*i32", "tally": "*i64", "num_tokens": "i32"}


def score_types(dtype: torch.dtype, *, has_norm: bool) -> dict[str, Any]:
    kind = "*" + NAMES[dtype]
    norm = StreamNorm("*fp32", kind, "fp32", kind) if has_norm else None  # type: ignore[arg-type]
    return {"x": kind, "norm": norm, "rows": None, "weight": kind, "scores": "*fp32", "num_tokens": "i32"}


def reduced_layouts(built: Compiled) -> set[str]:
    """Return the layouts of rows of numbers that are added up or compared, on which the order of a sum depends."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", built.ir, re.MULTILINE))
    names = re.findall(r"\(tensor<\d+xf32, (#\w+)>\) -> f32", built.ir)
    return {layouts[name] for name in names}


@each_dtype
@pytest.mark.parametrize("name", MODELS)
def test_routing(name: str, dtype: torch.dtype) -> None:
    num_experts, top_k, _, hidden = MODELS[name]
    for num_tokens in (16, 2048):
        constants = route.scores_config(num_tokens, num_experts, hidden, dtype) | {"WIDTH": 0, "PDL": True}
        scores = compiled(route.scores_kernel, score_types(dtype, has_norm=name == "mixtral-8x7b"), constants)
        check(scores, "mma" if dtype == torch.bfloat16 else "fma")
        assert loads_before_wait(scores) == weight_loads(constants, has_norm=name == "mixtral-8x7b")
    kept = {"first_kept": num_experts // 2, "num_kept": num_experts // 2}
    constants = {"EXPERTS": num_experts, "BLOCK": 16, "SLICES": 8, "PDL": True, "num_warps": 1}
    for form in (RouterForm(top_k, num_shared=2), RouterForm(top_k, **kept)):
        constants["C"] = route.choice_of(num_experts, form)
        chosen = compiled(choose_kernel, choice_types(), constants)
        check(chosen, "atom")
        assert loads_before_wait(chosen) == []
    groups = {"EXPERTS": 256, "C": route.choice_of(256, RouterForm(8, is_softmax=False, groups=8, groups_taken=4))}
    check(compiled(choose_kernel, choice_types() | {"bias": "*fp32"}, constants | groups))


@each_dtype
@pytest.mark.parametrize("name", MODELS)
def test_routing_of_one_token_adds_in_the_order_of_many(name: str, dtype: torch.dtype) -> None:
    num_experts, top_k, _, hidden = MODELS[name]
    choice = {"SLICES": 8, "C": route.choice_of(num_experts, RouterForm(top_k)), "PDL": True}
    types = choice_types() | score_types(dtype, has_norm=True) | {"counter": "*i32"}
    constants = route.scores_config(1, num_experts, hidden, dtype) | {"WIDTH": 0}
    one = compiled(route.route_one_kernel, types, constants | choice)
    check(one, "mma" if dtype == torch.bfloat16 else "fma")
    assert loads_before_wait(one) == weight_loads(constants, has_norm=True)
    of_many = choice | {"EXPERTS": num_experts, "BLOCK": 16, "num_warps": 1}
    many = reduced_layouts(compiled(choose_kernel, choice_types(), of_many))
    assert many and many == reduced_layouts(one)


@pytest.mark.parametrize("kind", ["*i8", "*fp8e4nv"])
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_routing_that_leaves_rows_in_8_bits(name: str, has_groups: bool, kind: str) -> None:
    num_experts, top_k, _, hidden = MODELS[name]
    types = choice_types() | score_types(torch.bfloat16, has_norm=True) | {"counter": "*i32"}
    types["rows"] = RowOperand(kind, "*fp32", "i32")  # type: ignore[arg-type]
    choice = {"SLICES": 8, "C": route.choice_of(num_experts, RouterForm(top_k))}
    for num_tokens, kernel in ((1, route.route_one_kernel), (16, route.scores_kernel)):
        constants = route.scores_config(num_tokens, num_experts, hidden, torch.bfloat16) | {"PDL": True}
        constants |= {"WIDTH": route.width_of(hidden, has_groups=has_groups)} | (choice if num_tokens == 1 else {})
        # What a division that is rounded correctly keeps while it calls.
        check(compiled(kernel, types, constants), "div.rn.f32", max_spilled_bytes=16)


def loads_before_wait(built: Compiled) -> list[str]:
    """Return the reads of memory that the kernel before may still write."""
    before, _ = built.ptx.split("griddepcontrol.wait")
    return re.findall(r"ld\.global\S*", before)


def weight_loads(constants: dict[str, Any], *, has_norm: bool) -> list[str]:
    """Return the reads of 16-bit weights of a router and its norm by a program that takes all columns at once."""
    if constants["BK"] < constants["COLUMNS"]:
        return []
    num_threads, columns = 32 * constants["num_warps"], constants["BK"]
    of_norm = {32: "ld.global.v4.b32", 128: "ld.global.b32"}[num_threads]
    return ["ld.global.v4.b32"] * (constants["BE"] * columns // (8 * num_threads)) + [of_norm] * has_norm


FORMS = {
    "plain": (Stack(torch.empty(1, 1, 1)), None),
    "int8-g128": (Stack(torch.empty(1, 1, 1), torch.empty(1, 1, 1), kind=WeightKind(8, 128)), "*i8"),
    "int8-g32": (Stack(torch.empty(1, 1, 1), torch.empty(1, 1, 1), kind=WeightKind(8, 32)), "*i8"),
    "int8": (Stack(torch.empty(1, 1, 1), torch.empty(1, 1, 1), kind=WeightKind(8, 0)), "*i8"),
    "int4-g128": (Stack(torch.empty(1, 1, 1), torch.empty(1, 1, 1), kind=WeightKind(4, 128)), "*u8"),
    "awq": (Stack(torch.empty(1, 1, 1), torch.empty(1, 1, 1), torch.empty(1), WeightKind(4, 128, True)), "*u8"),
    "w8a8": (Stack(torch.empty(1, 1, 1), torch.empty(1, 1, 1), is_eight=True), "*i8"),
    "fp8": (Stack(torch.empty(1, 1, 1), torch.empty(1, 1, 1), is_eight=True), "*fp8e4nv"),
    "fp8-block": (Stack(torch.empty(1, 256, 1), torch.empty(1, 1, 2), is_eight=True), "*fp8e4nv"),
}


#: Those that take most registers, and one of each kind of product.
FEW = {("plain", 16), ("plain", 64), ("plain", 128), ("awq", 128), ("w8a8", 16), ("fp8-block", 128)}
CASES = [
    pytest.param("qwen3-30b-a3b", form, block, marks=() if (form, block) in FEW else pytest.mark.full)
    for form in FORMS
    for block in sorted(experts.TILES)
]
CASES += [pytest.param("mixtral-8x7b", "plain", block, marks=pytest.mark.full) for block in sorted(experts.TILES)]


@pytest.mark.parametrize(("name", "form", "block"), CASES)
def test_products(name: str, form: str, block: int) -> None:
    dtype = torch.bfloat16
    _, top_k, size, hidden = MODELS[name]
    kind = "*" + NAMES[dtype]
    stack, of_values = FORMS[form]
    scale = "*fp32" if stack.is_eight else kind
    weight = StackOperand(of_values or kind, scale if of_values else None, scale if form == "awq" else None)
    rows = RowOperand(of_values, "*fp32", "i32") if stack.is_eight else RowOperand(kind, None, "i32")
    shape: dict[str, Any] = {"SIZE": size, "HIDDEN": hidden, "PDL": True}
    is_wgmma = form.startswith("fp8") or (form != "w8a8" and block > 32)
    instruction = "wgmma" if is_wgmma else "mma"
    types = {"x": rows, "weight": weight, "y": kind, "work": WORK, "num_tokens": "i32"}
    first, second = (experts.config(block, dtype.itemsize, stack, of_down=of_down) for of_down in (False, True))
    first |= {"TOP_K": top_k, "IS_ONE": block == 16}
    gate_up = compiled(experts.gate_up_kernel, types, shape | first)
    check(gate_up, instruction)
    types = {"y": rows, "weight": weight, "z": "*fp32", "work": WORK, "num_tokens": "i32", "stream": None}
    second |= {"TOP_K": top_k, "TOKENS": 16}
    if block == 16:
        types["stream"] = ExpertStream("*i32", "*fp32", kind, "*fp32", "*i32")  # type: ignore[arg-type]
    down = compiled(experts.down_kernel, types, shape | second)
    check(down, instruction)
    # The kernel before gate and up writes the list; of down's, one before that. Nothing else is read early.
    assert loads_before_wait(gate_up) == []
    assert set(loads_before_wait(down)) == {"ld.global.cg.b32"}


@each_model
@pytest.mark.parametrize("form", ["plain", "fp8", pytest.param("w8a8", marks=pytest.mark.full), "fp8-block"])
def test_down_of_one_token(name: str, form: str) -> None:
    _, top_k, size, hidden = MODELS[name]
    scales = torch.empty(1, size // 128, hidden // 128, device="meta") if form == "fp8-block" else FORMS[form][0].scales
    stack, of_values = FORMS[form]
    stack = stack._replace(values=torch.empty(1, hidden, size, device="meta"), scales=scales)
    weight = StackOperand(of_values or "*bf16", "*fp32" if of_values else None, None)
    rows = RowOperand(of_values, "*fp32", "i32") if stack.is_eight else RowOperand("*bf16", None, "i32")
    types = {"y": rows, "weight": weight, "experts": "*i32", "weights": "*fp32", "h": "*bf16", "partial": "*fp32"}
    constants = experts.config(16, 2, stack, of_down=True) | down_alone.config(top_k, 2, stack)
    built = compiled(down_alone.down_alone_kernel, types, constants | {"SIZE": size, "HIDDEN": hidden, "PDL": True})
    check(built, "wgmma")
    # The choice and the stream are older than the kernel before, but not than what this multiprocessor may have kept.
    assert all(".cg." in read for read in loads_before_wait(built))


@each_model
@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
@pytest.mark.parametrize("of_down", [False, True])
def test_products_of_many_tokens(name: str, kind: str, of_down: bool) -> None:
    _, _, size, hidden = MODELS[name]
    problem = SegmentProblem(hidden, size, 0) if of_down else SegmentProblem(2 * size, hidden, size)
    types: dict[str, Any] = {"y": "*fp32" if of_down else "*" + kind, "work": WORK, "num_tokens": "i32"}
    for operand, rows in (("x", many_rows.GROUP_ROWS), ("w", segments.ROWS // 2)):
        types[operand] = f"tensordesc<{kind}[{rows}, {many_rows.STEP}],{many_rows.step_layout()!r}>"
    built = compiled_gluon(segments.segment_kernel, {"P": problem, "TILE": segments.TILE}, 4, **types)
    check(built, "wgmma.mma_async")
    assert "cp.async.bulk.tensor.2d" in built.ptx
    assert "serialized" not in kept_report(built.ptx)


#: Those that take most registers.
MANY = [("fp8", False), ("fp8-block", False), ("fp8-block", True)]


@each_model
@pytest.mark.parametrize(
    ("form", "of_down"),
    [
        pytest.param(form, of_down, marks=() if (form, of_down) in MANY else pytest.mark.full)
        for form in ("w8a8", "fp8", "fp8-block")
        for of_down in (False, True)
    ],
)
def test_products_of_many_tokens_of_8_bits(name: str, form: str, of_down: bool) -> None:
    _, _, size, hidden = MODELS[name]
    problem = SegmentProblem(hidden, size, 0) if of_down else SegmentProblem(2 * size, hidden, size)
    stack, values = FORMS[form]
    of_values = f"tensordesc<{(values or '').removeprefix('*')}[64, 128],{box_layout(2)!r}>"
    types: dict[str, Any] = {"x": of_values, "w": of_values, "x_scale": "*fp32", "w_scale": "*fp32", "work": WORK}
    types |= {"y": "*fp32" if of_down else "*bf16", "num_tokens": "i32", "x_stride": "i32"}
    constants = {"P": problem, "W": segments8.tile_for(stack), "PDL": True}
    built = compiled_gluon(segments8.segment8_kernel, constants, 4, **types)
    check(built, "wgmma.mma_async")
    assert "serialized" not in kept_report(built.ptx)
    assert built.ptx.count("cp.async.bulk.tensor.2d") == 4
    assert loads_before_wait(built) == []


@pytest.mark.parametrize("groups", [0, 1, 11])
def test_rows_are_brought_together(groups: int) -> None:
    scale = "*fp32" if groups else None
    types: dict[str, Any] = {"x": "*i16", "found": "*i16", "scales": scale, "found_scales": scale, "work": WORK}
    types |= dict.fromkeys(["num_tokens", "stride", "found_stride"], "i32")
    constants = {"TOP_K": 8, "WIDTH": 1024, "GROUPS": max(1, groups), "GROUPS_PAD": 16 if groups > 1 else 1}
    built = compiled(gather_kernel, types, constants | {"ROWS": 16, "COLUMNS": 512, "PDL": True})
    check(built, "st.global.v4")
    assert loads_before_wait(built) == []


@each_model
@each_dtype
def test_sums(name: str, dtype: torch.dtype) -> None:
    _, top_k, _, hidden = MODELS[name]
    kind = "*" + NAMES[dtype]
    types = {"z": "*fp32", "experts": "*i32", "weights": "*fp32", "out": kind, "partial": "*fp32"}
    check(compiled(experts.sum_kernel, types, {"HIDDEN": hidden, "TOP_K": top_k, "BLOCK": 1024, "PDL": True}))
