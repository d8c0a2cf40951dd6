"""No compiler chooses how often a sum is rounded, or in which order, in kernels that compute the same formula.

`a * b + c` may become one fma, which rounds once, or a product and a sum, which round twice; the choice may differ from
kernel to kernel. In the kernels here every sum of an inexact product is an fma in the source. The order of a sum of
many numbers follows from the layout, which the compiler chooses by the width of what is loaded.

Needs Triton and its ptxas, no GPU.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from photon_grpc.kernels import norm_add, swiglu
from photon_grpc.kernels.linear import tiles
from photon_grpc.kernels.linear.tiles import Problem
from photon_grpc.kernels.rotary import rotary, rotate_store
from photon_grpc.kernels.rotary.rotate_store import Rotation
from photon_grpc.kernels.sampling import process_logits, sample
from photon_grpc.kernels.sampling.sample import TileBest
from tests.kernels.test_compile import MODELS, PROCESSING, SAMPLING, compiled, page_types, unscaled
from tests.kernels.test_compile_fused import projection, qkv_problem

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

MODEL = MODELS["1B"]
_DEFINITION = re.compile(r"^\s*(%\w+)(?:, %\w+)* = ([\w.]+)(.*)$", re.MULTILINE)
#: Operations that hand on what they are given.
_MOVES = {"ttg.convert_layout", "tt.broadcast", "tt.expand_dims", "tt.splat", "tt.reshape", "tt.trans"}


def left_to_choose(ir: str) -> list[str]:
    """Return the sums of an inexact product."""
    definitions = {name: (kind, re.findall(r"%\w+", rest), rest) for name, kind, rest in _DEFINITION.findall(ir)}

    def origin(name: str) -> tuple[str, list[str], str]:
        kind, operands, rest = definitions.get(name, ("", [], ""))
        return origin(operands[0]) if kind in _MOVES else (kind, operands, rest)

    def is_inexact_product(name: str) -> bool:
        kind, operands, _ = origin(name)
        # The product of two numbers of 16 bits has all its bits in float32.
        return kind == "arith.mulf" and any(origin(operand)[0] != "arith.extf" for operand in operands)

    def is_negation(operands: list[str]) -> bool:
        kind, _, rest = origin(operands[0])
        return kind == "arith.constant" and "0.000000e+00" in rest

    return [
        f"{name} = {kind} {rest}"
        for name, (kind, operands, rest) in definitions.items()
        if kind in ("arith.addf", "arith.subf") and not is_negation(operands)
        if any(map(is_inexact_product, operands))
    ]


def rotate_store_ir(unused: dict[str, Any], product: str = "*bf16", *, in_8_bits: bool = False) -> str:
    types: dict[str, Any] = dict.fromkeys(["h", "bias", "q"], "*bf16") | {"qkv": product}
    types |= page_types(torch.bfloat16, in_8_bits)
    types |= {"partial": "*fp32", "slice_stride": "i32"}
    types |= {"rotation": Rotation("*fp32", "*fp32", "*i64", "*i64"), "block_stride": "i32", "eps": "fp32"}  # type: ignore[arg-type]
    types["norms"] = ("*bf16", "*bf16")
    sizes = MODEL.hidden, MODEL.q_heads, MODEL.kv_heads, MODEL.head_dim, MODEL.block_size
    config = rotate_store.config(*sizes, rounds=True)
    unused = {"partial": None} | unscaled(in_8_bits) | unused
    return compiled(rotate_store.rotate_store_kernel, types, config | unused | {"PDL": True}).ir


@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("unused", [{}, {"h": None, "bias": None}], ids=["library", "tile"])
def test_heads_after_a_product(unused: dict[str, Any], in_8_bits: bool) -> None:
    assert left_to_choose(rotate_store_ir(unused, in_8_bits=in_8_bits)) == []


@pytest.mark.parametrize("product", ["*bf16", "*fp32"])
def test_the_norm_of_heads_is_a_tree_of_sums_of_two(product: str) -> None:
    ir = rotate_store_ir({"h": None, "bias": None}, product)
    axes = re.findall(r'"tt\.reduce"\(.*?\) <\{axis = (\d).*?\}\) : \(tensor<([\dx]+)xf32', ir, re.DOTALL)
    assert axes
    assert all(shape.split("x")[int(axis)] == "2" for axis, shape in axes)


def test_heads_of_a_layer_that_is_not_fused() -> None:
    types = dict.fromkeys(["q", "k"], "*bf16") | {"cos": "*fp32", "sin": "*fp32", "positions": "*i64"}
    types |= {"q_stride": "i32", "k_stride": "i32"}
    built = compiled(rotary.rotary_kernel, types, rotary.config(MODEL.q_heads, MODEL.kv_heads, MODEL.head_dim))
    assert left_to_choose(built.ir) == []


@pytest.mark.parametrize("bias", ["*bf16", None])
def test_swiglu_after_a_product(bias: str | None) -> None:
    types = dict.fromkeys(["gate_up", "h", "y", "bias"], "*bf16") | {"stride": "i32", "eps": "fp32"}
    config = swiglu.norm_config(8, MODEL.intermediate, MODEL.hidden) | {"PDL": True}
    unused = {"bias": None} if bias is None else {}
    assert left_to_choose(compiled(swiglu.norm_swiglu_kernel, types, config | unused).ir) == []


def test_the_norm_of_a_product_that_is_added() -> None:
    types = {"y": "*bf16", "weight": "*fp32", "h": "*bf16", "partial": "*fp32", "slice_stride": "i32", "eps": "fp32"}
    config = norm_add.config(MODEL.hidden, 1, rounds=True) | {"bias": None, "PDL": True}
    assert left_to_choose(compiled(norm_add.norm_add_kernel, types, config).ir) == []


@pytest.mark.parametrize("rows", [8, 64])
def test_the_ends_of_a_tile(rows: int) -> None:
    heads, gated = qkv_problem(MODEL, rows), Problem(2 * MODEL.intermediate, MODEL.hidden, rows, MODEL.intermediate)
    for end, problem in (("rotary", heads), ("rotary8", heads), ("swiglu", gated), ("geglu", gated)):
        tile = tiles.TABLE[problem.N, problem.K][rows]
        assert tile is not None
        assert left_to_choose(projection(end, tile, problem).ir) == []


def test_processed_logits_and_samples() -> None:
    types: dict[str, Any] = {"logits": "*fp32", "slots": "*i64", "context_len": "*i32", "processing": PROCESSING}
    types |= {"is_constrained": "*i1", "num_columns": "i32", "stride": "i32"}
    written = compiled(process_logits.process_kernel, types, process_logits.config() | {"PDL": True})
    best = TileBest("*fp32", "*fp32", "*i32", "*i1")  # type: ignore[arg-type]
    types = {"logits": "*fp32", "metadata": SAMPLING, "processing": PROCESSING, "best_of": best}
    types |= dict.fromkeys(("num_columns", "stride", "num_tiles", "first"), "i32")
    sampled = compiled(sample.sample_kernel, types, sample.config() | {"PDL": True})
    assert left_to_choose(written.ir) == left_to_choose(sampled.ir) == []
