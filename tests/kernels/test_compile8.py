"""The kernels of 8-bit products compiled ahead of time for sm_90: every bucket of rows, every way that is considered.

None spills, all fit, and the tensor cores multiply 8 bits.

Needs Triton and its ptxas, no GPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from photon_grpc.kernels.linear import quantize, rescale, tiles8, wide8
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.products8 import PARTS
from photon_grpc.kernels.linear.tiles import HeadSplit, Problem, holds_heads
from photon_grpc.kernels.linear.tiles8 import Way, Weights
from photon_grpc.kernels.linear.wgmma8 import Eight, wgmma8_kernel
from photon_grpc.kernels.linear.wide8 import GROUP_ROWS, TileSize, tile_of, wide8_kernel
from photon_grpc.kernels.linear.wide8_sums import box_layout, scale_layout
from tests.kernels.eight import FORMATS, each_format
from tests.kernels.test_compile import MODELS, Compiled, check, compiled, kept_report
from tests.kernels.test_compile_fused import EPILOGUES, OPERANDS, compiled_gluon

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

#: Type -> its name in signatures, the instruction of the tensor cores.
TYPES = {torch.int8: ("*i8", ".s32.s8.s8"), torch.float8_e4m3fn: ("*fp8e4nv", ".f32.e4m3.e4m3")}


def projection(name: str, end: str, way: Way, problem: Problem, *, in_parts: bool = False) -> Compiled:
    kind, has_blocks = FORMATS[name]
    load, store = EPILOGUES[end]
    constants: dict[str, Any] = {"bias": None, "LOAD": load, "STORE": store, "P": problem, "TILE": way.tile}
    constants |= {"E": Eight(has_blocks, in_parts), "PDL": True}
    types: dict[str, Any] = dict.fromkeys(["w", "x"], TYPES[kind][0]) | dict.fromkeys(["w_scale", "x_scale"], "*fp32")
    absent = ["operands"] if end not in OPERANDS else []
    absent += [] if has_blocks else ["scale_stride"]
    absent += [] if end in ("rotary", "swiglu") else ["eps", "partial"]
    absent += [] if way.slices > 1 else ["partials"]
    types |= {"operands": OPERANDS.get(end), "partials": ("*i32", "*i32"), "scale_stride": "i32"}
    return compiled_gluon(wgmma8_kernel, constants | dict.fromkeys(absent), way.tile.KW, **types)


def projections(name: str) -> dict[str, tuple[str, Problem]]:
    """Return the end and the sizes of each product of a layer."""
    model = MODELS[name]
    heads = HeadSplit(model.q_heads, model.kv_heads, model.block_size)
    n = (model.q_heads + 2 * model.kv_heads) * model.head_dim
    return {
        "qkv": ("rotary", Problem(n, model.hidden, 0, model.head_dim // 2, HEADS=heads)),
        "output": ("add", Problem(model.hidden, model.q_heads * model.head_dim, 0)),
        "gate_up": ("swiglu", Problem(2 * model.intermediate, model.hidden, 0, model.intermediate)),
        "down": ("add", Problem(model.hidden, model.intermediate, 0)),
    }


def weights_of(name: str) -> Weights:
    kind, has_blocks = FORMATS[name]
    return Weights(kind == torch.int8, has_blocks)


def check_way(name: str, end: str, way: Way, problem: Problem) -> Compiled:
    if end == "rotary" and not holds_heads(way.tile, problem.SPAN):
        end, problem = "plain", problem._replace(SPAN=0, HEADS=None)
    built = projection(name, end, way, problem._replace(BM=way.rows, SLICES=way.slices))
    check(built, TYPES[FORMATS[name][0]][1])
    assert "wgmma.mma_async" in built.ptx
    before_wait, behind = built.ptx.split("griddepcontrol.wait", 1)
    # Weights are on their way before the wait, and where there are enough of them eight neighbours are stored together.
    assert "cp.async.c" in before_wait
    assert "griddepcontrol.launch_dependents" in behind
    assert "st.global.v4" in behind or way.rows < 64
    return built


def chosen(name: str, end: str, problem: Problem, rows: int) -> Way:
    product = Product(problem.N, problem.K, rows, problem.SPAN, end)
    way = tiles8.choose(product, weights_of(name), may_decline=False)
    assert way is not None
    return way


#: Bucket -> a product of the 8B.
SAMPLE = {8: "down", 16: "qkv", 32: "output", 64: "gate_up", 128: "down"}


@pytest.mark.parametrize("rows", SAMPLE)
@each_format
def test_a_way_of_each_bucket(name: str, rows: int) -> None:
    end, problem = projections("8B")[SAMPLE[rows]]
    built = check_way(name, end, chosen(name, end, problem, rows), problem)
    if name != "w8a8":
        # Sums of 128 columns begin at zero: the first of four products adds to nothing.
        products = [line for line in built.ptx.splitlines() if "wgmma.mma_async" in line]
        assert all((line.rstrip(";").split(",")[-3].strip() == "0") == (i % 4 == 0) for i, line in enumerate(products))


@pytest.mark.full
@pytest.mark.parametrize("rows", quantize.ROWS)
@pytest.mark.parametrize("which", ["qkv", "output", "gate_up", "down"])
@pytest.mark.parametrize("model", ["1B", "8B"])
@each_format
def test_every_way_that_is_considered(name: str, model: str, which: str, rows: int) -> None:
    end, problem = projections(model)[which]
    product = Product(problem.N, problem.K, rows, problem.SPAN, end)
    for way in tiles8.candidates(product, weights_of(name)):
        check_way(name, end, way, problem)


@each_format
def test_columns_that_do_not_fill_a_step(name: str) -> None:
    problem = Problem(1152, 896 + 16, 16)
    built = check_way(name, "add", chosen(name, "add", problem, 16), problem)
    # Sixteen bytes at a time all the same.
    assert "cp.async.cg.shared.global [ %" in built.ptx
    assert "cp.async.ca" not in built.ptx or name == "fp8-block"


@each_format
def test_parts_of_many_rows(name: str) -> None:
    for way in PARTS:
        built = projection(name, "plain", way, Problem(4096, 4096, way.rows), in_parts=True)
        check(built, "wgmma.mma_async")


def wide(name: str, end: str, size: TileSize, problem: Problem) -> Compiled:
    kind, has_blocks = FORMATS[name]
    load, store = EPILOGUES[end]
    tile = tile_of(size, has_blocks=has_blocks)
    constants: dict[str, Any] = {"bias": None, "LOAD": load, "STORE": store, "P": problem._replace(BM=GROUP_ROWS)}
    constants |= {"TILE": wide8.TILE, "W": tile, "PDL": True}
    absent = ["operands"] if end not in OPERANDS else []
    absent += ["x_scale" if has_blocks else "x_scales"] + ([] if end in ("rotary", "swiglu") else ["norms"])
    short = TYPES[kind][0].removeprefix("*")
    box = [1, 4, 2, 8, 128] if problem.SPAN else [64, 128]
    types: dict[str, Any] = dict.fromkeys(["w_scale", "x_scale", "norms"], "*fp32") | {"operands": OPERANDS.get(end)}
    types["w"] = f"tensordesc<{short}{box},{box_layout(len(box))!r}>"
    types["x"] = f"tensordesc<{short}[128, 128],{box_layout(2)!r}>"
    types["x_scales"] = f"tensordesc<fp32[1, 128],{scale_layout()!r}>"
    return compiled_gluon(wide8_kernel, constants | dict.fromkeys(absent), wide8.TILE.KW, **types)


@pytest.mark.parametrize(
    ("which", "size"),
    [
        ("output", TileSize(1, 2)),
        ("gate_up", TileSize(1, 2)),
        ("gate_up", TileSize(2, 2)),
        ("down", TileSize(1, 1)),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("down", TileSize(2, 2)), ("qkv", TileSize(1, 2)))),
    ],
)
@each_format
def test_many_rows(name: str, which: str, size: TileSize) -> None:
    end, problem = projections("8B")[which]
    if size not in wide8.sizes(has_blocks=FORMATS[name][1]):
        pytest.skip("blocks have one part")
    built = wide(name, end, size, problem)
    check(built, TYPES[FORMATS[name][0]][1], max_spilled_bytes=16)
    assert "serialized" not in kept_report(built.ptx)
    # W is on its way before the fetching warp waits.
    before_wait, behind = built.ptx.split("griddepcontrol.launch_dependents")
    assert "cp.async.bulk.tensor" in before_wait
    # Values of each half of W and of each part of x; scales of blocks beside them.
    assert behind.count("cp.async.bulk.tensor.5d") == (size.halves if problem.SPAN else 0)
    scales = size.parts if FORMATS[name][1] else 0
    halves = 0 if problem.SPAN else size.halves
    assert behind.count("cp.async.bulk.tensor.2d") == halves + size.parts + scales
    assert "st.global.v4" in built.ptx


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_quantize(dtype: str, kind: torch.dtype) -> None:
    types = {"x": "*" + dtype, "values": TYPES[kind][0], "scales": "*fp32", "scale_stride": "i32"}
    types |= {"weight": "*" + dtype, "norms": "*fp32", "eps": "fp32", "num_rows": "i32"}
    plain = {"weight": None, "norms": None, "eps": None}
    sizes = [(4096, True, False), (4096, False, False), (28672, False, False), (4096, True, True)]
    for size, grouped, whole, rows in (*((*each, 1) for each in sizes), (768, False, False, 2), (384, True, False, 4)):
        config = quantize.config(size, kind, grouped=grouped, whole=whole, is_many=rows > 1) | ({} if whole else plain)
        config |= {"num_rows": None} if rows == 1 else {}
        assert config["ROWS"] == rows
        built = compiled(quantize.quantize_rows_kernel, types, config | {"PDL": True})
        check(built, "griddepcontrol.wait")
        assert "ld.global.v4" in built.ptx
        # A division that is not rounded correctly has other bits than torch's; that of a mean is as in every norm. Only
        # scales are divided: a division of every number has a branch.
        assert 0 < built.ptx.count("div.rn.f32") <= 2 * config["GROUPS"] * rows
        assert built.ptx.count("div.full.f32") == whole


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sums", ["i32", "fp32"])
def test_rescale(sums: str, dtype: str) -> None:
    types = {"sums": "*" + sums, "s_x": "*fp32", "s_w": "*fp32", "y": "*" + dtype}
    check(compiled(rescale.rescale_kernel, types, rescale.config(4096) | {"PDL": True}), "griddepcontrol.wait")
