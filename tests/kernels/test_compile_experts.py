"""The kernels of experts, compiled ahead of time for sm_90 at the shapes of real models."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from photon_grpc.kernels.linear.weight import WeightKind
from photon_grpc.kernels.moe import experts, route
from photon_grpc.kernels.moe.choose import choose_kernel
from photon_grpc.kernels.moe.products import RowOperand, StackOperand
from photon_grpc.kernels.moe.route import RouterForm, StreamNorm, WorkList
from photon_grpc.kernels.moe.stacks import Stack
from tests.kernels.test_compile import NAMES, Compiled, check, compiled

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

#: Experts, top_k, intermediate size, hidden size.
MODELS = {"qwen3-30b-a3b": (128, 8, 768, 2048), "mixtral-8x7b": (8, 2, 14336, 4096)}
WORK = WorkList(*("*i32",) * 5)
each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@each_dtype
@pytest.mark.parametrize(("name", "is_one"), [("qwen3-30b-a3b", True), ("mixtral-8x7b", False)])
def test_routing(name: str, is_one: bool, dtype: torch.dtype) -> None:
    num_experts, top_k, _, hidden = MODELS[name]
    kind = "*" + NAMES[dtype]
    norm = StreamNorm("*fp32", kind, "fp32", kind) if is_one else None  # type: ignore[arg-type]
    types = {"x": kind, "norm": norm, "weight": kind, "scores": "*fp32", "num_tokens": "i32"}
    constants = route.scores_config(1 if is_one else 2048, num_experts, hidden, dtype) | {"PDL": True}
    scores = compiled(route.scores_kernel, types, constants)
    check(scores, "mma" if dtype == torch.bfloat16 else "fma")
    assert loads_before_wait(scores) == []
    types = {"scores": "*fp32", "bias": None, "num_real": "*i32", "experts": "*i32", "weights": "*fp32", "work": WORK}
    types |= {"counters": "*i32", "tally": "*i64", "num_tokens": "i32"}
    kept = {"first_kept": num_experts // 2, "num_kept": num_experts // 2}
    for form in (RouterForm(top_k, num_shared=2), RouterForm(top_k, **kept)):
        constants = route.choose_config(num_experts, form) | {"BLOCK": 16, "SLICES": 8, "IS_ONE": is_one, "PDL": True}
        chosen = compiled(choose_kernel, types, constants)
        check(chosen, "" if is_one else "atom")
        assert loads_before_wait(chosen) == []
    constants |= route.choose_config(256, RouterForm(8, is_softmax=False, groups=8, groups_taken=4))
    check(compiled(choose_kernel, types | {"bias": "*fp32"}, constants))


def loads_before_wait(built: Compiled) -> list[str]:
    """Return the reads of memory that the kernel before may still write."""
    before, _ = built.ptx.split("griddepcontrol.wait")
    return re.findall(r"ld\.global\S*", before)


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
    gate_up = compiled(experts.gate_up_kernel, types, shape | {"TOP_K": top_k} | first)
    check(gate_up, instruction)
    types = {"y": rows, "weight": weight, "z": "*fp32", "work": WORK, "num_tokens": "i32"}
    down = compiled(experts.down_kernel, types, shape | second)
    check(down, instruction)
    # The kernel before gate and up writes the list; of down's, one before that. Nothing else is read early.
    assert loads_before_wait(gate_up) == []
    assert loads_before_wait(down) == ["ld.global.cg.b32"] * 4


@each_model
@each_dtype
def test_sums(name: str, dtype: torch.dtype) -> None:
    _, top_k, _, hidden = MODELS[name]
    kind = "*" + NAMES[dtype]
    types = {"z": "*fp32", "experts": "*i32", "weights": "*fp32", "out": kind, "partial": "*fp32"}
    check(compiled(experts.sum_kernel, types, {"HIDDEN": hidden, "TOP_K": top_k, "BLOCK": 1024, "PDL": True}))
