"""Products with packed weights on CUDA: the bits of the 16-bit kernel with the weight that they stand for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch

from photon_grpc.kernels.linear import cost, dequantize, embed, epilogue, head, tiles, wide, wide_tiles
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.cut import num_slices
from photon_grpc.kernels.linear.fused_linear import Affine, Fusion, Gate, launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from photon_grpc.kernels.sampling import sample
from photon_grpc.layers.operands import PackedOperands
from tests.kernels import fused
from tests.kernels.fused import EPS, LAYER, Sizes, padded, stream
from tests.kernels.packed import KINDS, arranged, packed_weight

pytestmark = pytest.mark.gpu
#: One slice, two of whole groups, four that begin within a group and of which the last is shorter.
SHAPES = [(6144, 4096), (896, 4864), (1536, 8960)]
SUMS = Fusion(epilogue.load_nothing, epilogue.store_sums, guard=True)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def each_shape_and_kind(several_rows: Sequence[int]) -> pytest.MarkDecorator:
    """Return all combinations of a shape, rows and a kind; `full` but for a few with each kind and each shape and rows.

    A combination compiles up to 38 kernels.
    """
    cases = []
    for number, kind in enumerate(KINDS):
        kept = SHAPES[number % len(SHAPES)], several_rows[number % len(several_rows)]
        for shape, rows in itertools.product(SHAPES, several_rows):
            marks = () if (shape, rows) == kept else pytest.mark.full
            cases.append(pytest.param(shape, rows, kind, marks=marks, id=f"{shape[0]}x{shape[1]}-{rows}-{kind}"))
    return pytest.mark.parametrize(("shape", "rows", "kind"), cases)


def dense(weight: QuantizedWeight) -> torch.Tensor:
    w = torch.full(weight.shape, torch.nan, dtype=weight.scales.dtype, device="cuda")
    dequantize.launch(weight, w)
    return w


def sums(w: torch.Tensor | QuantizedWeight, x: torch.Tensor, tile: Tile, slices: int) -> torch.Tensor:
    n = w.shape[0]
    y = torch.full((x.shape[0], n), torch.nan, device="cuda")
    counters = torch.zeros(n // 16, dtype=torch.int32, device="cuda")
    launch(SUMS, tile, Affine(w, slices=slices), x, y, counters=counters)
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


@each_shape_and_kind([40, 129, 192, 256, 700])
def test_products_of_many_rows_have_the_bits_of_the_16_bit_kernel(
    shape: tuple[int, int], rows: int, kind: WeightKind
) -> None:
    n, k = shape
    weight, slices = arranged(packed_weight(n, k, kind, device="cuda")), num_slices(n, k, bits=kind.BITS)
    x = torch.randn(rows, k, device="cuda").bfloat16()
    parts = [sums(dense(weight), part, Tile("wgmma", 64, 64, 4, 6), slices) for part in x.split(64)]
    linear = Affine(weight, slices=slices)
    for tile in wide_tiles.tiles(slices, k):
        found = wide.sums(x, linear, tile)
        assert torch.equal(functools.reduce(torch.add, found), torch.cat(parts)), tile
        if not tile.IS_SPLIT:
            y = torch.full((rows, n), torch.nan, dtype=x.dtype, device="cuda")
            wide.launch(wide.PLAIN, x, linear, y, tile)
            assert torch.equal(y, torch.cat(parts).bfloat16()), tile


@pytest.mark.parametrize("kind", [WeightKind(8, 128), WeightKind(8), WeightKind(4, 32, True, True)], ids=str)
@pytest.mark.parametrize(("rows", "bias"), [(129, False), (300, True)])
@pytest.mark.parametrize("sizes", [Sizes(2048, 32, 8, 64, 8192), Sizes(4096, 32, 8, 128, 14336, 64)], ids=str)
def test_ends_of_many_rows_have_the_bits_of_the_library_with_the_dequantized_weight(
    sizes: Sizes, rows: int, bias: bool, kind: WeightKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, hidden = (sizes.q_heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.hidden
    problem = fused.Problem(n, hidden, rows, torch.bfloat16, "cuda")
    rotation, cache, h = problem.rotation(sizes), problem.cache(sizes), problem.x

    def operands(rows_of_w: int, columns: int, slices: int) -> PackedOperands:
        weight = arranged(packed_weight(rows_of_w, columns, kind, device="cuda"))
        b = torch.randn(rows_of_w, device="cuda").bfloat16() if bias else None
        return PackedOperands(weight, b, slices)

    qkv, up = operands(n, hidden, 1), operands(2 * sizes.intermediate, hidden, 1)
    down = operands(hidden, sizes.intermediate, 2)
    results = []
    handed = wide_tiles.WideTile(128, 5, MORE=64, IS_HANDED=True)
    for tile in (wide_tiles.WideTile(128, 6), handed, None):
        # Registers hold two slices of 128 rows.
        few = tile and (wide_tiles.SHARED if tile.IS_HANDED else tile)
        monkeypatch.setattr(wide, "choose", lambda x, linear, t=tile, few=few: t if linear.slices == 1 else few)
        q = torch.empty(rows, sizes.q_heads * sizes.head_dim, dtype=torch.bfloat16, device="cuda")
        out = HeadOutput(q, cache.clone(), LAYER, rotation)
        qkv.qkv(h, EPS, out)
        y = torch.full((rows, sizes.intermediate), torch.nan, dtype=torch.bfloat16, device="cuda")
        up.swiglu(h, EPS, y)
        added = h.clone()
        down.add_to(added, y)
        results.append((out.q, out.cache.nan_to_num(), y, added))
    for found in results[:2]:
        for of_wide, expected in zip(found, results[2], strict=True):
            assert torch.equal(of_wide, expected)


@each_shape_and_kind(tiles.BUCKETS)
def test_every_tile_has_the_bits_of_the_16_bit_kernel(shape: tuple[int, int], rows: int, kind: WeightKind) -> None:
    n, k = shape
    weight = arranged(packed_weight(n, k, kind, device="cuda"))
    x = torch.randn(rows - 3, k, device="cuda").bfloat16()
    plain = Product(n, k, rows, 0, "head", num_slices(n, k, bits=kind.BITS))
    # The library has the same sums, but this test does not depend on its settings.
    of_16_bits = cost.choose(plain, may_decline=False) or Tile("wgmma", 64, 64, 4, 6)
    expected = sums(dense(weight), x, of_16_bits, plain.slices)
    found = cost.candidates(plain._replace(weight=kind))
    assert found
    for tile in found:
        assert torch.equal(sums(weight, x, tile, plain.slices), expected), tile


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
        swiglu_launch(stream(x), Affine(w), Gate(EPS), y, tile, counters)
        results.append(y)
    assert torch.equal(*results)


@functools.cache
def head_weight(n: int, k: int) -> QuantizedWeight:
    return arranged(packed_weight(n, k, WeightKind(8), device="cuda"))


@pytest.mark.parametrize("shape", [(128256, 4096), (32768, 2048)])
@pytest.mark.parametrize("rows", [1, 7, 16, 64, 100])
def test_a_head_of_8_bits_draws_from_the_logits_of_its_numbers(rows: int, shape: tuple[int, int]) -> None:
    (n, k), kind = shape, WeightKind(8)
    weight = head_weight(n, k)
    x = torch.randn((rows, k), generator=torch.Generator().manual_seed(rows)).bfloat16().cuda()
    product = Product(n, k, tiles.bucket(rows) or 0, 0, "head", num_slices(n, k, bits=kind.BITS), kind)
    tile = cost.choose(product, may_decline=False)
    assert tile is not None
    logits, w = head.logits_launch(x, Affine(weight), tile), dense(weight)
    exact = torch.cat([x.double() @ part.double().t() for part in w.split(16384)], 1)
    assert (logits - exact).abs().max() <= 2e-5 * exact.abs().max()
    # Of more rows than a tile is chosen for.
    of_16_bits = cost.choose(product._replace(weight=WeightKind()), may_decline=False) or Tile("wgmma", 64, 64, 4, 6)
    assert torch.equal(logits, head.logits_launch(x, Affine(w), of_16_bits))
    number = torch.arange(rows, device="cuda")
    temperature, slots = ((number + 1) % 2) * 0.7, number.flip(0)
    metadata = sample.SamplingMetadata(
        slots, (number + 9).int(), temperature.float(), number * 7 + (1 << 40), number % 2, number % 5
    )
    assert torch.equal(head.sample_launch(x, Affine(weight), metadata, tile), sample.reference(logits, metadata))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [None, 33.75])
@pytest.mark.parametrize("size", [960, 4096])
def test_rows_of_an_embedding_are_those_of_its_numbers(size: int, factor: float | None, dtype: torch.dtype) -> None:
    table = packed_weight(1000, size, WeightKind(8), dtype, "cuda")
    ids = torch.randint(0, 1000, (37,), device="cuda")
    expected = torch.empty(37, size, dtype=dtype, device="cuda")
    of_expected = torch.empty(37, size // 16, device="cuda")
    embed.launch(dense(arranged(table)), ids, expected, of_expected, factor)
    for held in (table, arranged(table)):
        h, partial = torch.full_like(expected, torch.nan), torch.full_like(of_expected, torch.nan)
        embed.launch(held, ids, h, partial, factor)
        assert torch.equal(h, expected)
        assert torch.equal(partial, of_expected)
