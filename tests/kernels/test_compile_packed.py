"""Products with packed weights compiled ahead of time for sm_90: none spills, all fit."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from photon_grpc.kernels.linear import cost, dequantize, tiles, wide, wide_sums, wide_tiles
from photon_grpc.kernels.linear.boxes import box_layout
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.tiles import Problem, Tile, num_pieces, stored_width
from photon_grpc.kernels.linear.weight import WeightKind
from tests.kernels.packed import KINDS, packed_weight
from tests.kernels.test_compile import Compiled, check, compiled, kept_report
from tests.kernels.test_compile_fused import EPILOGUES, OPERANDS, compiled_gluon, projection

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
#: An end, N, K, the distance of pairs: one slice, pairs, slices that begin within a group.
SHAPES = [("plain", 6144, 4096, 0), ("swiglu", 28672, 4096, 14336), ("add", 1536, 8960, 0)]
OF_256_ROWS = wide_tiles.WideTile(128, 4, MORE=128, PIECES=2)
SAMPLE = [WeightKind(8), WeightKind(8, 128), WeightKind(4, 32), WeightKind(4, 128, True, True)]


def considered(end: str, n: int, k: int, span: int, rows: int, kind: WeightKind) -> tuple[Product, list[Tile]]:
    """Return the product and its tiles, the best by the model of cost first."""
    product = Product(n, k, rows, span, "head" if end == "plain" else end, num_slices(n, k, bits=kind.BITS), kind)
    return product, sorted(cost.candidates(product), key=lambda tile: cost.tile_us(tile, product))


def built_well(end: str, tile: Tile, product: Product) -> None:
    built = projection(end, tile, product.problem(product.span))
    # An address or two may go to the stack, and behind the last step part of 128 sums a thread, to which others are
    # added: still the fastest tile of some products.
    of_end = tile.BN * product.rows == 128 * 32 * tile.KW and product.slices > 1
    check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync", max_spilled_bytes=352 if of_end else 32)
    if built.spilled_bytes > 32:
        assert not re.search(r"\b(STL|LDL)\b", machine_code(built.ptx).rsplit("HGMMA", 1)[0])
    before_wait = built.ptx.split("griddepcontrol.wait", 1)[0]
    # Packed bytes, and what stands beside them, are on their way before the wait, 16 bytes at a time.
    assert len(re.findall(r"cp\.async\.c[ga]\S*", before_wait)) >= 2
    assert set(re.findall(r"cp\.async\.c[ga]\.\S+ \[[^]]*\], \[[^]]*\], (\w+)", built.ptx)) == {"0x10"}


def machine_code(ptx: str) -> str:
    """Return what ptxas makes of it, as text."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with TemporaryDirectory() as directory:
        command = [tools / "ptxas", "--gpu-name", "sm_90a", "-", "-o", f"{directory}/kernel"]
        subprocess.run(command, input=ptx, text=True, check=True)
        command = [tools / "cuobjdump", "-sass", f"{directory}/kernel"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("rows", "kind"), list(zip(tiles.BUCKETS, [*SAMPLE, SAMPLE[1]], strict=True)), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_that_are_chosen(shape: tuple[str, int, int, int], rows: int, kind: WeightKind) -> None:
    product, found = considered(*shape, rows, kind)
    built_well(shape[0], found[0], product)


@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize(("n", "k"), [(128256, 4096)])
def test_a_head_of_8_bits_that_samples(n: int, k: int, rows: int) -> None:
    product = Product(n, k, rows, 0, "head", 1, WeightKind(8))
    tile = cost.choose(product, may_decline=False)
    assert tile is not None
    check(projection("sample", tile, product.problem(0)._replace(GUARD=True)), "mma", max_spilled_bytes=8)


def many_rows(
    end: str, n: int, k: int, span: int, tile: wide_tiles.WideTile, slices: int, kind: WeightKind, y: str = "*bf16"
) -> Compiled:
    load, store = EPILOGUES[end]
    of_program = Problem(n, k, tile.BM, span, SLICES=slices, WEIGHT=kind)
    width, groups = stored_width(kind.BITS, wide_tiles.STEP), num_pieces(kind.GROUP, wide_tiles.STEP, k, slices)
    constants: dict[str, Any] = {"bias": None, "LOAD": load, "STORE": store, "P": of_program, "TILE": wide.TILE}
    constants |= {"W": tile, "PDL": True}
    absent = [] if end in OPERANDS else ["operands"]
    absent += [] if tile.IS_HANDED else ["handed"]
    absent += [] if kind.HAS_ZEROS else ["zeros"]
    absent += [] if kind.HAS_NORM else ["norm"]
    absent += [] if end == "swiglu" else ["norms"]
    stored = {8: "i8", 4: "u8"}[kind.BITS]
    at_once = wide_sums.rows_at_once(span, tile.IS_SHARED)
    sides_at_once = wide_sums.sides_at_once(span, tile.IS_SHARED, groups)
    rows = described(stored, [1, at_once // 16, 2, 8, width] if span else [at_once, width], width)
    sides = described("bf16", [groups, 1, sides_at_once // 16, 2, 8] if span else [groups, sides_at_once], 0)
    types: dict[str, Any] = {"w": rows, "scales": sides, "zeros": sides, "norm": described("bf16", [1, 64], 0)}
    types |= {
        "x": described("bf16", [wide_sums.x_box(), 64], 128),
        "whole_x": described("bf16", [tile.BM, 64], 128),
        "y": "*fp32" if tile.IS_SPLIT else y,
        "norms": "*fp32",
        "handed": ("*fp32", "*i32"),
    }
    types["operands"] = OPERANDS.get(end)
    return compiled_gluon(wide.wide_kernel, constants | dict.fromkeys(absent), wide.TILE.KW, **types)


def described(kind: str, box: list[int], swizzle: int) -> str:
    """Return the type of a descriptor."""
    bits = 16 if kind == "bf16" else 8
    return f"tensordesc<{kind}{box},{box_layout(len(box), bits, swizzle)!r}>"


@pytest.mark.parametrize(
    ("end", "shape", "tile", "slices", "kind"),
    [
        ("swiglu", (28672, 4096, 14336), OF_256_ROWS._replace(IS_HANDED=True), 1, SAMPLE[3]),
        ("swiglu", (28672, 4096, 14336), wide_tiles.WideTile(128, 5, MORE=64, IS_HANDED=True), 1, SAMPLE[1]),
        ("add", (4096, 14336, 0), wide_tiles.WideTile(128, 6), 2, SAMPLE[1]),
        ("add", (4096, 14336, 0), wide_tiles.WideTile(128, 6), 4, SAMPLE[2]),
        ("plain", (1536, 8960, 0), wide_tiles.WideTile(128, 6, IS_SPLIT=True), 4, SAMPLE[2]),
        ("add", (4096, 14336, 0), wide_tiles.SHARED, 2, SAMPLE[1]),
        ("add", (4096, 14336, 0), wide_tiles.SHARED, 4, SAMPLE[1]),
        pytest.param("plain", (6144, 4096, 0), OF_256_ROWS, 1, SAMPLE[0], marks=pytest.mark.full),
        pytest.param("add", (5120, 5120, 0), wide_tiles.WideTile(64, 8), 1, SAMPLE[0], marks=pytest.mark.full),
    ],
)
def test_tiles_of_many_rows(
    end: str, shape: tuple[int, int, int], tile: wide_tiles.WideTile, slices: int, kind: WeightKind
) -> None:
    n, k, span = shape
    built = many_rows(end, n, k, span, tile, slices, kind)
    check(built, "wgmma.mma_async")
    assert "cp.async.bulk.tensor" in built.ptx
    # The fetching and the multiplying warps share the registers of a multiprocessor.
    assert "setmaxnreg.dec" in built.ptx
    # All four warps have read a stage, or left or read sums, before one thread says so.
    assert re.search(r"mbarrier\.arrive\.shared", built.ptx)
    for before in built.ptx.split("mbarrier.arrive.shared")[:-1]:
        assert re.findall(r"bar\.sync|ldmatrix|ld\.shared|st\.shared|wgmma", before)[-1] == "bar.sync"
    # Of W copies are on their way before the wait of the warp that makes them.
    fetching = built.ptx.split("griddepcontrol.launch_dependents")[0]
    assert fetching.rindex("griddepcontrol.wait") > fetching.rindex("cp.async.bulk.tensor")
    # ptxas says so where it waits for every product.
    assert "serialized" not in kept_report(built.ptx)


#: The kind with most bytes a step: two scales of a row, and a norm.
LARGEST = WeightKind(8, 32, HAS_NORM=True)


@pytest.mark.parametrize(
    ("tile", "slices"),
    [(tile, slices) for slices in (1, 2) for tile in wide_tiles.tiles(slices, 4096)],
    ids=lambda one: "-".join(map(str, map(int, one))) if isinstance(one, tuple) else str(one),
)
def test_every_tile_has_room_for_sums_in_float32(tile: wide_tiles.WideTile, slices: int) -> None:
    # What a head, and products in float16, take from shared memory beside the steps.
    check(many_rows("plain", 128256, 4096, 0, tile, slices, LARGEST, "*fp32"), "wgmma.mma_async", max_spilled_bytes=64)


@pytest.mark.full
@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_that_are_considered(shape: tuple[str, int, int, int], kind: WeightKind, rows: int) -> None:
    product, found = considered(*shape, rows, kind)
    for tile in dict.fromkeys((found[0], found[-1], *found[:: max(1, len(found) // 4)])):
        built_well(shape[0], tile, product)


@pytest.mark.parametrize("kind", SAMPLE, ids=str)
def test_dequantize(kind: WeightKind) -> None:
    weight = packed_weight(16, 256, kind)._replace(is_arranged=True)
    types = {"words": "*i32", "scales": "*bf16", "zeros": "*bf16", "norm": "*bf16", "w": "*bf16", "num_columns": "i32"}
    absent = {side: None for side in ("zeros", "norm") if getattr(weight, side) is None}
    assert weight.scales.dtype == torch.bfloat16
    check(compiled(dequantize.dequantize_kernel, types, dequantize.config(weight) | absent))
