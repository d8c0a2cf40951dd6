"""Products with packed weights on CUDA: the bits of the 16-bit kernel with the weight that they stand for."""

from __future__ import annotations

import functools

import pytest
import torch

from photon_grpc.kernels.linear import cost, dequantize, epilogue, tiles, wide
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.fused_linear import Affine, Fusion, launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile, fits
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind
from tests.kernels.fused import EPS, padded, stream
from tests.kernels.packed import KINDS, arranged, packed_weight

pytestmark = pytest.mark.gpu
#: One slice, two of whole groups, four that begin within a group and of which the last is shorter.
SHAPES = [(6144, 4096), (896, 4864), (1536, 8960)]
SUMS = Fusion(epilogue.load_nothing, epilogue.store_sums, guard=True)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def dense(weight: QuantizedWeight) -> torch.Tensor:
    w = torch.full(weight.shape, torch.nan, dtype=weight.scales.dtype, device="cuda")
    dequantize.launch(weight, w)
    return w


def sums(w: torch.Tensor | QuantizedWeight, x: torch.Tensor, tile: Tile) -> torch.Tensor:
    n, k = w.shape
    y = torch.full((x.shape[0], n), torch.nan, device="cuda")
    counters = torch.zeros(n // 16, dtype=torch.int32, device="cuda")
    launch(SUMS, tile, Affine(w, slices=num_slices(n, k, is_packed=True)), x, y, counters=counters)
    assert not counters.any()
    return y


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_arranged", [False, True])
def test_a_weight_is_dequantized_as_the_reference_does(kind: WeightKind, dtype: torch.dtype, is_arranged: bool) -> None:
    weight = packed_weight(264, 4864, kind, dtype, "cuda")
    weight = arranged(weight) if is_arranged else weight
    expected = torch.empty(weight.shape, dtype=dtype, device="cuda")
    dequantize.reference(weight, expected)
    assert torch.equal(dense(weight), expected)


@each_kind
@pytest.mark.parametrize("rows", [129, 256, 700])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_many_rows_have_the_bits_of_the_16_bit_kernel(
    shape: tuple[int, int], rows: int, kind: WeightKind
) -> None:
    n, k = shape
    weight, slices = arranged(packed_weight(n, k, kind, device="cuda")), num_slices(n, k, is_packed=True)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    parts = [sums(dense(weight), part, Tile("wgmma", 64, 64, 4, 6)) for part in x.split(64)]
    linear = Affine(weight, slices=slices)
    tried = [tile for tile in wide.WIDE if fits(tile.tile, wide.problem(tile, n, k, slices, kind), wide.MAX_BYTES)]
    assert tried
    for tile in tried:
        found = wide.launch(x, linear, tile)
        assert torch.equal(functools.reduce(torch.add, found), torch.cat(parts)), tile
    if slices == 1:
        assert torch.equal(wide.launch(x, linear, tried[0], x.dtype)[0], torch.cat(parts).bfloat16())


@each_kind
@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_has_the_bits_of_the_16_bit_kernel(shape: tuple[int, int], rows: int, kind: WeightKind) -> None:
    n, k = shape
    weight = arranged(packed_weight(n, k, kind, device="cuda"))
    x = torch.randn(rows - 3, k, device="cuda").bfloat16()
    plain = Product(n, k, rows, 0, "head", num_slices(n, k, is_packed=True))
    # The library has the same sums, but this test does not depend on its settings.
    of_16_bits = cost.choose(plain, may_decline=False) or Tile("wgmma", 64, 64, 4, 6)
    expected = sums(dense(weight), x, of_16_bits)
    found = cost.candidates(plain._replace(weight=kind))
    assert found
    for tile in found:
        assert torch.equal(sums(weight, x, tile), expected), tile


@pytest.mark.parametrize("kind", [WeightKind(8, 128), WeightKind(8), WeightKind(4, 128, True, True)], ids=str)
@pytest.mark.parametrize("rows", tiles.BUCKETS)
def test_pairs_of_rows_have_their_own_scales(rows: int, kind: WeightKind) -> None:
    n, k = 3072, 2048
    weight = arranged(packed_weight(n, k, kind, device="cuda"))
    x = padded(rows - 1, k, torch.bfloat16, "cuda", torch.Generator().manual_seed(0))
    tile = Tile("gemv", 32, 128, 2, 4) if rows <= 32 else Tile("wgmma", 64, 128, 4, 4)
    results = []
    for w in (weight, dense(weight)):
        y = torch.full((rows - 1, n // 2), torch.nan, dtype=torch.bfloat16, device="cuda")
        counters = torch.zeros(n // 16, dtype=torch.int32, device="cuda")
        swiglu_launch(stream(x), Affine(w), EPS, y, tile, counters)
        results.append(y)
    assert torch.equal(*results)
