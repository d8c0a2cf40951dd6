"""The kernels of experts, compiled ahead of time for sm_90 at the shapes of real models."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from photon_grpc.kernels.moe import experts, route
from photon_grpc.kernels.moe.route import RouterForm, WorkList
from tests.kernels.test_compile import NAMES, check, compiled

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

#: Experts, top_k, intermediate size, hidden size.
MODELS = {"qwen3-30b-a3b": (128, 8, 768, 2048), "mixtral-8x7b": (8, 2, 14336, 4096)}
WORK = WorkList(*("*i32",) * 5)
each_model = pytest.mark.parametrize("name", MODELS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@each_model
@each_dtype
def test_routing(name: str, dtype: torch.dtype) -> None:
    num_experts, top_k, _, hidden = MODELS[name]
    types = {"x": "*" + NAMES[dtype], "weight": "*" + NAMES[dtype], "scores": "*fp32", "num_tokens": "i32"}
    constants = {"EXPERTS": num_experts, "HIDDEN": hidden, "PRECISION": "ieee", "PDL": True}
    check(compiled(route.scores_kernel, types, constants | route.SCORES), "mma" if dtype == torch.bfloat16 else "fma")
    types = {"scores": "*fp32", "num_real": "*i32", "experts": "*i32", "weights": "*fp32", "work": WORK}
    types |= {"counters": "*i32", "tally": "*i64", "num_tokens": "i32"}
    constants = route.choose_config(num_experts, RouterForm(top_k)) | {"BLOCK": 16, "PDL": True}
    check(compiled(route.choose_kernel, types, constants), "atom")


@each_model
@each_dtype
@pytest.mark.parametrize("block", sorted(experts.TILES))
def test_products(name: str, dtype: torch.dtype, block: int) -> None:
    _, top_k, size, hidden = MODELS[name]
    kind = "*" + NAMES[dtype]
    first, second = experts.tiles_of(block, dtype.itemsize)
    shape: dict[str, Any] = {"SIZE": size, "HIDDEN": hidden, "BM": block, "PRECISION": "ieee", "PDL": True}
    types = {"x": kind, "weight": kind, "y": kind, "work": WORK, "num_tokens": "i32"}
    instruction = "fma" if dtype == torch.float32 else "mma"
    check(compiled(experts.gate_up_kernel, types, shape | {"TOP_K": top_k} | first), instruction)
    types = {"y": kind, "weight": kind, "z": "*fp32", "work": WORK, "num_tokens": "i32"}
    check(compiled(experts.down_kernel, types, shape | second), instruction)
    types = {"z": "*fp32", "experts": "*i32", "weights": "*fp32", "out": kind}
    check(compiled(experts.sum_kernel, types, {"HIDDEN": hidden, "TOP_K": top_k, "BLOCK": 1024, "PDL": True}))
