"""The tile chosen for a product of any shape: one that divides it and fits, or the table's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernels.sweep import projections
from benchmarks.shapes import SHAPES
from photon_grpc.kernels.linear import cost, tiles, wide16_tiles
from photon_grpc.kernels.linear.cost import H200, Device, Product
from photon_grpc.kernels.linear.cut import num_slices, slice_columns
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.linear.weight import WeightKind

#: Multiprocessors, bytes of one, bytes of a program, wgmma: H200, A100, an RTX 4090, an H100 of 114.
DEVICES = [
    H200,
    Device(108, 167_936, tiles.pipeline_bytes(166_912), has_wgmma=False),
    Device(128, 102_400, tiles.pipeline_bytes(101_376), has_wgmma=False),
    Device(114, 233_472, tiles.SHARED_BYTES, has_wgmma=True),
]
each_device = pytest.mark.parametrize("device", DEVICES)
TILE = Tile("gemv", 16, 256, 1, 6)
PUBLIC = sorted({projection.product(8) for shape in SHAPES.values() for projection in projections(shape)})


def assert_can(tile: Tile, product: Product, device: Device) -> None:
    """Check what the kernels require of a tile, by their own descriptions."""
    n, k, rows, span, end, slices, weight = product
    assert (n % tile.BN, k % 8) == (0, 0)
    if tile.kind == "wide16":
        found = wide16_tiles.tile_of(rows, n, k)
        assert found is not None and n % (wide16_tiles.ROWS * found.HALVES) == 0
        assert (end, slices, weight.BITS, device.has_wgmma) == ("swiglu", 1, 16, True)
        return
    # Only the last slice may be shorter.
    assert slice_columns(k, slices) % tile.BK == 0
    assert slice_columns(k, slices) > tile.BK
    beside = slices if tile.kind == "gemv" else 1
    # The first operand of wgmma has 64 rows.
    is_x_first = tile.kind == "wgmma" and tile.BN < 64
    held = 64 if is_x_first else rows
    assert tile.NS * beside * tile.BK * (tile.BN * weight.BITS // 8 + held * 2) <= device.max_bytes
    # A row is copied 16 bytes at a time.
    assert k * weight.BITS % 128 == 0
    if end == "swiglu":
        assert span % (tile.BN // 2) == 0
    if tile.kind == "gemv":
        assert rows <= 32
        # Warps share the rows of W, at least 16 each, after slices are given one or more.
        assert tile.KW % slices == 0
        assert 16 * (tile.KW // slices) <= tile.BN
    else:
        assert tile.NS >= 3
        assert device.has_wgmma
        assert rows >= 16
        assert max(tile.BN, 64) >= 16 * tile.KW
        assert tile.BK % 64 == 0
        assert not is_x_first or (rows <= 64 and weight.BITS == 16)


@st.composite
def products(draw: st.DrawFn) -> Product:
    end = draw(st.sampled_from(("rotary", "normed", "swiglu", "add", "head")))
    half = draw(st.sampled_from((16, 20, 32, 40, 48, 64, 128)))
    n = draw(st.integers(1, 900)) * 16
    k, rows = draw(st.integers(1, 900)) * draw(st.sampled_from((8, 16, 32, 64))), draw(st.sampled_from(tiles.BUCKETS))
    if end in ("rotary", "normed"):
        n, span = 2 * half * draw(st.integers(3, 96)), half
    else:
        n, span = (2 * n, n) if end == "swiglu" else (n, 0)
    return Product(n, k, rows, span, end, draw(st.sampled_from((1, 1, 2, 4))))


@given(products(), st.sampled_from(DEVICES), st.booleans())
def test_a_tile_is_never_given_what_its_kernel_cannot_do(product: Product, device: Device, may_decline: bool) -> None:
    tile = cost.choose(product, device, may_decline=may_decline)
    if tile is not None:
        assert_can(tile, product, device)


@each_device
@pytest.mark.parametrize("rows", [8, 16, 32])
def test_few_rows_of_every_public_shape_are_multiplied_by_a_tile(rows: int, device: Device) -> None:
    for product in PUBLIC:
        if tiles.TABLE.get((product.n, product.k), {}).get(rows, TILE) is None and device.has_wgmma:
            continue
        tile = cost.choose(product._replace(rows=rows), device)
        assert tile is not None, product
        assert_can(tile, product._replace(rows=rows), device)


def test_the_table_comes_first_and_fits_its_products() -> None:
    for (n, k), by_rows in tiles.TABLE.items():
        known = [product for product in PUBLIC if (product.n, product.k) == (n, k) and product.epilogue != "normed"]
        for rows, tile in by_rows.items():
            for product in known or [Product(n, k, rows, 0, "head", num_slices(n, k))]:
                assert cost.choose(product._replace(rows=rows)) == tile
                if tile is not None:
                    assert_can(tile, product._replace(rows=rows), H200)


def test_heads_that_are_normalised_have_a_table_of_their_own() -> None:
    for (n, k), by_rows in tiles.NORMED_TABLE.items():
        for rows, tile in by_rows.items():
            product = Product(n, k, rows, 128, "normed", num_slices(n, k))
            assert cost.choose(product) == tile != cost.choose(product._replace(epilogue="rotary"))
            assert tile is not None
            assert_can(tile, product, H200)


@pytest.mark.each_value
@pytest.mark.parametrize("rows", tiles.BUCKETS)
@pytest.mark.parametrize("kind", [WeightKind(8), WeightKind(8, 32), WeightKind(4, 128, True, True)], ids=str)
def test_every_public_shape_has_tiles_for_packed_weights(kind: WeightKind, rows: int) -> None:
    for product in PUBLIC:
        slices = num_slices(product.n, product.k, bits=kind.BITS)
        packed = product._replace(rows=rows, weight=kind, slices=slices)
        if product.k % 128 == 0:
            tile = cost.choose(packed, may_decline=False)
            known = tiles.PACKED_TABLE.get((product.n, product.k, kind.BITS), {}).get(rows)
            assert tile is not None and (tile == known or tile in cost.candidates(packed)), packed
            assert_can(tile, packed, H200)


def test_a_packed_weight_takes_less_time_than_16_bits_where_memory_is_waited_for() -> None:
    whole, eight, four = (Product(28672, 4096, 8, 14336, "swiglu", 1, kind) for kind in map(WeightKind, (16, 8, 4)))
    tile = Tile("gemv", 64, 128, 4, 4)
    assert cost.tile_us(tile, four) < cost.tile_us(tile, eight) < cost.tile_us(tile, whole)
    assert tiles.shared_bytes(tile, eight.problem(0)) == 4 * (64 * 128 + 2 * 8 * 128)
    assert tiles.shared_bytes(tile, four.problem(0)._replace(WEIGHT=WeightKind(4, 64, True, True))) == 4 * (
        64 * 64 + 2 * 64 * 2 * 2 + 2 * 128 + 2 * 8 * 128
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_gate_and_up_of_many_tiles_is_left_to_the_kernel_that_shares_out_steps(bits: int) -> None:
    # Of a 14B, 272 tiles of 128 rows of W: 61.7 µs at 64 rows for 84.9 in 8 bits, 58.3 for 79.7 in 4.
    product = Product(34816, 5120, 8, 17408, "swiglu", weight=WeightKind(bits, 128))
    is_left = {rows: cost.choose(product._replace(rows=rows)) is None for rows in tiles.BUCKETS}
    assert is_left == {8: False, 16: False, 32: False, 64: True, 128: True}
    # Of a 1B, 128 tiles are those of one wave.
    small = Product(16384, 2048, 128, 8192, "swiglu", weight=WeightKind(bits, 128))
    assert cost.choose(small) is not None


@pytest.mark.parametrize(
    ("n", "k", "slices", "bits", "is_left"),
    [
        # Microseconds at 128 rows on an H200 by the best of few rows, and of many.
        (7168, 5120, 2, 4, True),  # 28.3 for 21.8
        (5120, 17408, 1, 8, True),  # 85.4 for 73.3
        (4096, 4096, 2, 8, True),  # 16.8 for 14.5
        (4096, 14336, 2, 8, False),  # 42.6 for 47.3
        (2048, 11008, 4, 8, False),  # 21.5 for 22.2
    ],
)
def test_packed_weights_of_128_rows_are_left_to_the_kernel_of_many_rows_where_it_is_faster(
    n: int, k: int, slices: int, bits: int, is_left: bool
) -> None:
    product = Product(n, k, 128, 0, "add", slices, WeightKind(bits, 128))
    assert (cost.choose(product) is None) == is_left
    assert cost.choose(product._replace(rows=64)) is not None
    assert cost.choose(product, may_decline=False) is not None


def test_what_the_table_does_not_know_is_left_to_the_library_above_64_rows() -> None:
    for product in PUBLIC:
        if (product.n, product.k) not in tiles.TABLE:
            assert cost.choose(product._replace(rows=128)) is None


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_a_product_that_the_library_cannot_take_has_a_tile_where_one_divides_it(rows: int) -> None:
    for product in PUBLIC:
        if tiles.TABLE.get((product.n, product.k), {}).get(rows, TILE) is not None:
            assert cost.choose(product._replace(rows=rows), may_decline=False) is not None
    assert cost.choose(Product(2048, 2047, rows, 0, "add"), may_decline=False) is None
    assert cost.choose(Product(2040, 2048, rows, 0, "add"), may_decline=False) is None


def test_time_grows_with_the_bytes_that_are_read() -> None:
    """By no more and no less than memory takes for them, where they are many."""
    times = [cost.tile_us(TILE, Product(n, 4096, 8, 0, "add")) for n in (132 * 16 * 16, 132 * 16 * 32)]
    more_us = 132 * 16 * 16 * 4096 * 2 / cost.TILES.memory
    assert more_us < times[1] - times[0] < 1.3 * more_us


def test_heads_that_are_normalised_pay_for_a_second_kernel() -> None:
    normed, rotated = (Product(6144, 4096, 8, 64, end) for end in ("normed", "rotary"))
    assert cost.tile_us(TILE, normed) > cost.tile_us(TILE, rotated)
