"""Products with packed weights compiled ahead of time for sm_90: none spills, all fit."""

from __future__ import annotations

import os
import re

import pytest
import torch

from photon_grpc.kernels.linear import cost, dequantize, tiles, wide
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.tiles import Tile, fits
from photon_grpc.kernels.linear.weight import WeightKind
from tests.kernels.packed import KINDS, packed_weight
from tests.kernels.test_compile import check, compiled
from tests.kernels.test_compile_fused import projection

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
#: An end, N, K, the distance of pairs: one slice, pairs, slices that begin within a group.
SHAPES = [("plain", 6144, 4096, 0), ("swiglu", 28672, 4096, 14336), ("add", 1536, 8960, 0)]
SAMPLE = [WeightKind(8), WeightKind(8, 128), WeightKind(4, 32), WeightKind(4, 128, True, True)]


def considered(end: str, n: int, k: int, span: int, rows: int, kind: WeightKind) -> tuple[Product, list[Tile]]:
    """Return the product and its tiles, the best by the model of cost first."""
    product = Product(n, k, rows, span, "head" if end == "plain" else end, num_slices(n, k, is_packed=True), kind)
    return product, sorted(cost.candidates(product), key=lambda tile: cost.tile_us(tile, product))


def built_well(end: str, tile: Tile, product: Product) -> None:
    built = projection(end, tile, product.problem(product.span))
    check(built, "wgmma.mma_async" if tile.kind == "wgmma" else "mma.sync")
    before_wait = built.ptx.split("griddepcontrol.wait", 1)[0]
    # Packed bytes, and what stands beside them, are on their way before the wait, 16 bytes at a time.
    assert len(re.findall(r"cp\.async\.c[ga]\S*", before_wait)) >= 2
    assert set(re.findall(r"cp\.async\.c[ga]\.\S+ \[[^]]*\], \[[^]]*\], (\w+)", built.ptx)) == {"0x10"}


@pytest.mark.parametrize(("rows", "kind"), list(zip(tiles.BUCKETS, [*SAMPLE, SAMPLE[1]], strict=True)), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_that_are_chosen(shape: tuple[str, int, int, int], rows: int, kind: WeightKind) -> None:
    product, found = considered(*shape, rows, kind)
    built_well(shape[0], found[0], product)


@pytest.mark.parametrize("kind", [SAMPLE[1], SAMPLE[3]], ids=str)
@pytest.mark.parametrize("tile", wide.WIDE, ids=str)
@pytest.mark.parametrize("slices", [1, 2])
def test_tiles_of_many_rows(slices: int, tile: wide.WideTile, kind: WeightKind) -> None:
    of_program = wide.problem(tile, 6144, 4096, slices, kind)
    assert fits(tile.tile, of_program, wide.MAX_BYTES)
    check(projection("plain", tile.tile, of_program), "wgmma.mma_async")


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
