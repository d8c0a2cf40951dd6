"""The Gluon kernels of a fused layer compiled ahead of time for sm_90: every tile of the table.

None spills, all fit, and the intended units are used.

Needs Triton and its ptxas, no GPU.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import pytest
import torch

from benchmarks.kernels.sweep import projections
from benchmarks.shapes import OF_OTHER_FORMS, SHAPES
from photon_grpc.kernels.attention import gluon_decode
from photon_grpc.kernels.attention.decode_columns import programs_and_pairs
from photon_grpc.kernels.attention.decode_ring import PageShape
from photon_grpc.kernels.attention.decode_tiles import RESERVED_BYTES, DecodeTile, Limits, choose
from photon_grpc.kernels.attention.gluon_decode import decode_attention_kernel
from photon_grpc.kernels.linear import cost, embed, epilogue, tiles
from photon_grpc.kernels.linear.cost import Device, Product
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.gemv import gemv_kernel
from photon_grpc.kernels.linear.sides import WeightOperand
from photon_grpc.kernels.linear.tiles import HeadSplit, Problem, Tile
from photon_grpc.kernels.linear.weight import WeightKind
from photon_grpc.kernels.linear.wgmma import wgmma_kernel
from photon_grpc.kernels.rotary.rotate_store import Rotation
from photon_grpc.kernels.sampling.sample import SamplingMetadata
from tests.kernels.test_compile import (
    MODELS,
    SCALES,
    Compiled,
    Model,
    check,
    compiled,
    leaves_of,
    one_page,
    ptxas_report,
    typed,
)

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

POINTERS = dict.fromkeys(["bias", "x", "y", "pages", "q", "out"], "*bf16")
POINTERS |= dict.fromkeys(["counters", "query_start", "context_len", "block_tables"], "*i32")
SCALARS = {"num_rows": "i32", "eps": "fp32", "scale": "fp32", "block_stride": "i32", "table_stride": "i32"}
SCALARS |= {"q_stride": "i32"}
POINTERS |= {"partial": "*fp32"}
EPILOGUES = {
    "add": (epilogue.load_residual, epilogue.add_residual),
    "swiglu": (epilogue.load_nothing, epilogue.store_swiglu),
    "geglu": (epilogue.load_nothing, epilogue.store_geglu),
    "rotary": (epilogue.load_angles, epilogue.store_heads),
    "rotary8": (epilogue.load_angles, epilogue.store_heads),
    "plain": (epilogue.load_nothing, epilogue.store_sums),
    "logits": (epilogue.load_nothing, epilogue.store_sums),
    "sample": (epilogue.load_nothing, epilogue.store_best),
}
METADATA = SamplingMetadata("*i64", "*i32", "*fp32", "*i64", "*i64", "*i64")
OPERANDS = {
    "add": (None, "*fp32"),
    "rotary": (Rotation("*fp32", "*fp32", "*i64", "*i64"), "*bf16", "i32", None),
    "rotary8": (Rotation("*fp32", "*fp32", "*i64", "*i64"), "*fp8e4nv", "i32", SCALES),
    "sample": (METADATA, "*fp32", "*i32"),
}


def compiled_gluon(kernel: Any, constants: dict[Any, Any], num_warps: int, arch: int = 90, **types_of: Any) -> Compiled:
    """Compile as the launcher would: pointers and strides are multiples of 16, the number of rows is anything.

    A tuple's type is the tuple of its types; numbers in it are strides. A constant within a tuple is named by its
    indices.
    """
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    types = POINTERS | SCALARS | types_of
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    is_stride = {(i,): name.endswith("stride") for i, name in enumerate(signature)}
    leaves = dict(leaves_of(tuple(signature.values())))
    constants = constants | {path: None for path, kind in leaves.items() if kind is None}
    signature = {name: typed(kind) for name, kind in signature.items()}
    aligned = [
        path
        for path, kind in leaves.items()
        if kind and (kind[0] == "*" or (kind != "fp32" and is_stride.get(path, True)))
    ]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
    registers, spilled = ptxas_report(built.asm["ptx"])
    return Compiled(built.asm["ttgir"], built.asm["ptx"], built.metadata.shared, spilled, registers)


def weight_operand(kind: WeightKind) -> WeightOperand:
    """Return the types of a weight."""
    if kind.BITS == 16:
        return WeightOperand("*bf16")
    zeros, norm = ("*bf16" if has else None for has in (kind.HAS_ZEROS, kind.HAS_NORM))
    return WeightOperand({8: "*i8", 4: "*u8"}[kind.BITS], "*bf16", zeros, norm)


def projection(end: str, tile: Tile, problem: Problem, arch: int = 90) -> Compiled:
    load, store = EPILOGUES[end]
    types: dict[str, Any] = {"weight": weight_operand(problem.WEIGHT)}
    constants = {"bias": None, "LOAD": load, "STORE": store, "P": problem, "TILE": tile, "PDL": arch >= 90}
    if end in ("sample", "logits"):
        types["y"] = "*fp32"
    if end in OPERANDS:
        types["operands"] = OPERANDS[end]
    else:
        constants["operands"] = None
    if end not in ("rotary", "rotary8", "swiglu", "geglu"):
        constants |= {"eps": None, "partial": None}
    if tile.kind == "gemv":
        return compiled_gluon(gemv_kernel, constants, tile.KW, arch, **types)
    if problem.SLICES > 1:
        types["partials"] = ("*fp32", "*i32")
    else:
        constants["partials"] = None
    return compiled_gluon(wgmma_kernel, constants, tile.KW, arch, **types)


def problem_of(n: int, k: int, rows: int, span: int = 0) -> Problem:
    return Problem(n, k, rows, span, SLICES=num_slices(n, k))


def qkv_problem(model: Model, rows: int) -> Problem:
    heads = HeadSplit(model.q_heads, model.kv_heads, model.block_size)
    n = (model.q_heads + 2 * model.kv_heads) * model.head_dim
    return Problem(n, model.hidden, rows, model.head_dim // 2, HEADS=heads, SLICES=num_slices(n, model.hidden))


@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize("name", ["1B", "8B"])
def test_projections_of_the_table(name: str, rows: int) -> None:
    model = MODELS[name]
    problems = [
        ("rotary", qkv_problem(model, rows)),
        ("rotary8", qkv_problem(model, rows)),
        ("add", problem_of(model.hidden, model.q_heads * model.head_dim, rows)),
        ("swiglu", problem_of(2 * model.intermediate, model.hidden, rows, model.intermediate)),
        ("add", problem_of(model.hidden, model.intermediate, rows)),
    ]
    for end, problem in problems:
        tile = tiles.TABLE[problem.N, problem.K][rows]
        if tile is None:
            continue
        built = projection(end, tile, problem)
        check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync")
        before_wait, behind = built.ptx.split("griddepcontrol.wait", 1)
        # Weights are on their way before the wait, and where there are enough of them eight neighbours are stored
        # together.
        assert "cp.async.c" in before_wait
        assert "griddepcontrol.launch_dependents" in behind
        assert "st.global.v4" in behind or rows < 64


#: Of each way to multiply that no shape of the table has: a shape, its product, rows.
SAMPLE = [
    ("qwen2.5-0.5b", "qkv", 8),  # a short last step
    ("qwen2.5-14b/8", "down", 8),
    ("qwen2.5-7b/4", "down", 32),
    ("qwen2.5-7b", "gate_up", 16),
    ("qwen3-8b", "qkv", 32),  # normalised in a second kernel
    ("qwen3-4b", "down", 64),  # in slices
    ("qwen2.5-7b", "gate_up", 64),
    ("3b", "down", 64),
]


@pytest.mark.parametrize(("name", "which", "rows"), SAMPLE)
def test_tiles_that_are_chosen_for_other_shapes(name: str, which: str, rows: int) -> None:
    shape = SHAPES[name]
    product = next(p for p in projections(shape) if p.name == which).product(rows)
    tile = cost.choose(product, may_decline=False)
    assert tile is not None
    heads = HeadSplit(shape["num_attention_heads"], shape["num_key_value_heads"], 64) if which == "qkv" else None
    end = "plain" if product.epilogue == "normed" else product.epilogue
    problem = product.problem(0 if end == "plain" else product.span)._replace(HEADS=heads)
    built = projection(end, tile, problem)
    check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync")
    if tile.kind == "wgmma" and problem.SLICES > 1:
        # Slices are exchanged in wide pieces, whatever pairs the epilogue needs.
        assert "ld.global.cg.v4" in built.ptx


@pytest.mark.parametrize("rows", [8, 64])
@pytest.mark.parametrize("name", ["gemma3-1b", "gemma3-4b"])
def test_tiles_that_are_chosen_for_gemma(name: str, rows: int) -> None:
    shape = OF_OTHER_FORMS[name]
    hidden, size = shape["hidden_size"], shape["intermediate_size"]
    for end, n, k, span in (("geglu", 2 * size, hidden, size), ("plain", hidden, size, 0)):
        slices = num_slices(n, k)
        tile = cost.choose(Product(n, k, rows, span, "swiglu" if span else "add", slices), may_decline=False)
        if tile is None:
            assert (end, rows) == ("plain", 64)
            continue
        built = projection(end, tile, Problem(n, k, rows, span, SLICES=slices))
        check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync")


@pytest.mark.parametrize(("tile", "rows"), [(Tile("gemv", 16, 64, 4, 3), 8), (Tile("wgmma", 64, 64, 4, 4), 16)])
@pytest.mark.parametrize("weight", [WeightKind(), WeightKind(8, 128), WeightKind(4, 32, True, True)], ids=str)
def test_the_last_slice_may_be_shorter(tile: Tile, rows: int, weight: WeightKind) -> None:
    check(projection("plain", tile, Problem(64, 1152, rows, SLICES=4, WEIGHT=weight)))


def test_a_step_asks_for_another_where_it_is_multiplied() -> None:
    """No branch is between: instructions are not moved past one, and a product's wait would not hide them."""
    built = projection("add", Tile("gemv", 16, 256, 1, 8), problem_of(4096, 4096, 8))
    blocks = re.split(r"^\$L__BB\w+:", built.ptx, flags=re.MULTILINE)
    (multiplied,) = [block.split("bra")[0] for block in blocks if "mma.sync" in block]
    assert (multiplied.count("mma.sync"), multiplied.count("cp.async.cg")) == (16, 24)
    # All warps have read a step before another takes its place, and one that has come is seen by all.
    kinds = r"ldmatrix|bar\.sync|cp\.async\.(?:cg|commit_group|wait_group)|mma\.sync"
    order = [kind for kind, _ in itertools.groupby(re.findall(kinds, multiplied))]
    asked = ["ldmatrix", "bar.sync", "cp.async.cg", "cp.async.commit_group", "mma.sync"]
    assert order == [*asked, "cp.async.wait_group", "bar.sync", "ldmatrix", "mma.sync"]


@pytest.mark.parametrize(("arch", "shared_bytes", "num_multiprocessors"), [(80, 166_912, 108), (89, 101_376, 128)])
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_tiles_have_room_on_devices_with_less_shared_memory(
    rows: int, arch: int, shared_bytes: int, num_multiprocessors: int
) -> None:
    model = MODELS["1B"]
    limit = tiles.pipeline_bytes(shared_bytes)
    device = Device(num_multiprocessors, shared_bytes + 1024, limit, has_wgmma=False)
    problems = [
        ("rotary", qkv_problem(model, rows)),
        ("swiglu", problem_of(2 * model.intermediate, model.hidden, rows, model.intermediate)),
    ]
    for end, problem in problems:
        tile = cost.choose(Product(*problem[:4], end, problem.SLICES), device)
        assert tile is not None
        built = projection(end, tile, problem, arch)
        assert built.shared_bytes <= shared_bytes


@pytest.mark.parametrize("end", ["sample", "logits"])
@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize("hidden", [2048, 4096])
def test_head(hidden: int, rows: int, end: str) -> None:
    problem = Problem(128256, hidden, rows, GUARD=True)
    tile = cost.choose(Product(128256, hidden, rows, 0, "head"))
    if tile is None:
        pytest.skip("the library's")
    built = projection(end, tile, problem)
    # The noise of 128 rows needs a few more registers than there are; it is made only if a row samples.
    spare = 160 if (end, rows) == ("sample", 128) else 0
    check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync", max_spilled_bytes=spare)
    assert "cp.async.c" in built.ptx.split("griddepcontrol.wait", 1)[0]


H200, A100, L4 = Limits(132, 232_448), Limits(108, 166_912), Limits(58, 101_376)


PARTIALS = "*fp32", "*fp32", "*fp32", "*i32"


def decode_attention(
    shape: PageShape, tile: DecodeTile, *, early: bool, arch: int = 90
) -> Compiled:  # fmt: skip
    constants = {"SHAPE": shape, "TILE": tile, "EARLY": early, "PDL": arch >= 90}
    constants |= {} if tile.SHARED else {"partials": None}
    types = {"rows": ("*i32" if shape.QUERIES > 1 else None, "*i32", "*i32"), "partials": PARTIALS}
    types |= {"scales": "*fp32", "pages": "*fp8e4nv"} if shape.CHUNK == 16 else {"scales": None}
    return compiled_gluon(decode_attention_kernel, constants, tile.KW, arch, **types)


def shape_of(model: Model) -> PageShape:
    return gluon_decode.shape(
        model.q_heads // model.kv_heads, one_page(model, torch.bfloat16, model.block_size)
    )  # fmt: skip


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", ["1B", "8B"])
def test_decode_attention(name: str, rows: int, early: bool) -> None:
    shape = shape_of(MODELS[name])
    for tile in {choose(rows * shape.KV_HEADS, shape, longest, H200)[0] for longest in (1, 131072)}:
        built = decode_attention(shape, tile, early=early)
        check(built, "mma.sync")
        assert ("cp.async.c" in built.ptx.split("griddepcontrol.wait", 1)[0]) == early


@pytest.mark.parametrize(("arch", "limits"), [(80, A100), (89, L4)])
@pytest.mark.parametrize("name", ["1B", "8B"])
def test_decode_attention_has_room_on_devices_with_less_shared_memory(name: str, arch: int, limits: Limits) -> None:
    shape = shape_of(MODELS[name])
    tile, _ = choose(shape.KV_HEADS, shape, 131072, limits)
    built = decode_attention(shape, tile, early=True, arch=arch)
    assert built.shared_bytes <= limits.shared_bytes


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize("name", ["1B", "8B"])
def test_decode_attention_of_a_mixed_batch(name: str, rows: int) -> None:
    shape = shape_of(MODELS[name])
    tile, _ = choose(rows * shape.KV_HEADS, shape, 131072, H200)
    constants = {"SHAPE": shape, "TILE": tile, "EARLY": False, "PDL": False}
    constants |= {} if tile.SHARED else {"partials": None}
    built = compiled_gluon(
        decode_attention_kernel, constants, tile.KW, rows=("*i32",) * 3, partials=PARTIALS, scales=None
    )
    check(built, "mma.sync")


#: Heads of 256 in the groups of Gemma 3, with and without a window; windows of other heads; several queries a row.
VARIANTS = {
    "256": PageShape(4, 2, 256, 64),
    "256, group of 4": PageShape(1, 4, 256, 16),
    "256, window": PageShape(4, 2, 256, 64, WINDOW=1024),
    "256, 4 queries": PageShape(4, 2, 256, 64, QUERIES=4),
    "64, window": PageShape(8, 4, 64, 64, WINDOW=512),
    "128, window": PageShape(8, 4, 128, 16, WINDOW=4096),
    "64, 4 queries": PageShape(8, 4, 64, 64, QUERIES=4),
    "64, 128 queries": PageShape(8, 4, 64, 64, QUERIES=128),
    "128, 2 queries": PageShape(8, 4, 128, 64, QUERIES=2),
    "128, 4 queries": PageShape(8, 4, 128, 64, QUERIES=4),
    "128, 4 queries in two programs": PageShape(8, 4, 128, 64, QUERIES=4, PAIRS=8),
    "128, 8 queries, window": PageShape(4, 7, 128, 64, WINDOW=512, QUERIES=8),
    "64, 8 bits": PageShape(8, 4, 64, 64, CHUNK=16),
    "128, 8 bits": PageShape(8, 4, 128, 64, CHUNK=16),
    "256, 8 bits, window": PageShape(4, 2, 256, 64, WINDOW=1024, CHUNK=16),
    "128, 8 bits, 4 queries": PageShape(8, 4, 128, 64, QUERIES=4, CHUNK=16),
}


@pytest.mark.parametrize("num_programs", [8, *(pytest.param(found, marks=pytest.mark.full) for found in (64, 4096))])
@pytest.mark.parametrize("name", VARIANTS)
def test_decode_attention_of_windows_wide_heads_several_queries_and_8_bits(name: str, num_programs: int) -> None:
    shape = VARIANTS[name]
    tile, _ = choose(num_programs, shape, 131072, H200)
    # ptxas keeps a number or two on the stack rather than a 129th register.
    check(decode_attention(shape, tile, early=True), "mma.sync", max_spilled_bytes=16)


@pytest.mark.parametrize("rows", [pytest.param(8, marks=pytest.mark.full), 16, 32, 64])
@pytest.mark.parametrize("name", ["64, 8 bits", "128, 8 bits", "256, 8 bits, window"])
def test_decode_attention_of_8_bits_with_the_tile_of_every_number_of_rows(name: str, rows: int) -> None:
    shape = VARIANTS[name]
    tile, _ = choose(rows * shape.KV_HEADS, shape, 131072, H200)
    check(decode_attention(shape, tile, early=True), "mma.sync", max_spilled_bytes=16)


def test_two_programs_with_long_rings_fit_a_multiprocessor() -> None:
    shape = VARIANTS["128, 8 bits"]
    tile, splits = choose(264, shape, 1, H200)
    built = decode_attention(shape, tile, early=True)
    check(built, "mma.sync")
    assert (tile.NS, splits) == (6, 1)
    assert 2 * (built.shared_bytes + RESERVED_BYTES) <= H200.shared_bytes + RESERVED_BYTES


@pytest.mark.parametrize(("group", "queries", "programs", "pairs"), [(4, 4, 1, 16), (4, 8, 2, 16), (7, 4, 2, 14)])
def test_queries_of_a_row_are_shared_out_over_programs(group: int, queries: int, programs: int, pairs: int) -> None:
    assert programs_and_pairs(PageShape(8, group, 128, 64, QUERIES=queries)) == (programs, pairs)
    assert programs_and_pairs(PageShape(8, 2, 256, 64, QUERIES=8)) == (2, 8)


@pytest.mark.parametrize("lane", [256, 1024])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 7, 16])
def test_decode_attention_of_other_shapes(group: int, head_dim: int, lane: int) -> None:
    for num_pairs, block_size in ((1, 16), (4096, 128), (64, 48)):
        shape = PageShape(8, group, head_dim, block_size)
        tile, _ = choose(num_pairs, shape, 131072, H200)
        built = decode_attention(shape, tile._replace(LANE=lane), early=True)
        # ptxas keeps an address or two on the stack for the rare shapes.
        check(built, "mma.sync", max_spilled_bytes=64)


def test_embed() -> None:
    types = {"table": "*bf16", "token_ids": "*i32", "h": "*bf16", "partial": "*fp32"}
    constants = embed.config(2048) | {"factor": None, "PDL": True}
    built = compiled(embed.embed_kernel, types, constants | {"scales": None, "IS_ARRANGED": False})
    check(built)
    assert "st.global.v" in built.ptx
    of_8_bits = types | {"table": "*i8", "scales": "*bf16"}
    check(compiled(embed.embed_kernel, of_8_bits, constants | {"IS_ARRANGED": True}))


@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize(("n", "k"), [(2048, 1024), (2048, 4096), (4096, 2048), (4096, 7168)])
def test_parts_of_a_sum_over_two_ranks(n: int, k: int, rows: int) -> None:
    """Of o and down of the 1B and the 8B; the 1B's down is in slices."""
    tile = cost.choose(Product(n, k, rows, 0, "head", num_slices(n, k)))
    if tile is not None:
        built = projection("logits", tile, Problem(n, k, rows, GUARD=True, SLICES=num_slices(n, k)))
        check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync")
