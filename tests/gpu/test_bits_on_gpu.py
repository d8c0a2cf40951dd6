"""Products on CUDA, bit for bit: every tile, at every number of rows, adds as the library does slice by slice.

    python -m pytest -m gpu tests/gpu/test_bits_on_gpu.py

Compared are the bytes of the float32 sums, of what each end makes of them, and of what the library makes in 16 bits.
In `make test-all` all tiles that `cost.py` considers, of all shapes; else those that it chooses, of a few.
"""

from __future__ import annotations

import functools
import os

# Read when the library's first handle is made: it may not split K either.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from benchmarks.kernels.sweep import Projection, projections
from benchmarks.shapes import SHAPES, UNUSUAL, Config
from photon_grpc.kernels.linear import cost, head, tiles
from photon_grpc.kernels.linear.cut import num_slices, slice_columns
from photon_grpc.kernels.linear.fused_linear import Affine, Gate, add_launch, launch, qkv_launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.rotary.rotate_store import HeadOutput, Rotation
from photon_grpc.layers.epilogues import AddResidual, Rotary, SwiGLU
from photon_grpc.layers.operands import DenseOperands
from tests.kernels.fused import stream

pytestmark = pytest.mark.gpu
EPS, BLOCK_SIZE, MOST_ROWS = 1e-5, 64, 8192
ROWS = (1, 2, 5, 8, 9, 16, 17, 32, 33, 64, 100, 128)
LIBRARY_ROWS = (1, 7, 8, 16, 33, 64, 100, 128, 129, 200, 255, 256, 300, 512, 1000, 2048, 4096, MOST_ROWS)
FEW = ("1b", "8b", "qwen2.5-0.5b", "qwen3-0.6b", "smollm2-360m", "llama2-7b")
#: Of these every tile that is considered: their kernels are compiled in a few minutes.
ALL_TILES = ("1b", "qwen2.5-0.5b")
ALL_SHAPES = SHAPES | UNUSUAL


def with_head(shape: Config) -> Iterator[Projection]:
    yield from projections(shape)
    yield Projection("head", shape["vocab_size"], shape["hidden_size"], 0, "head")


def cases(names: tuple[str, ...]) -> list[Projection]:
    """Return the different products of these shapes."""
    return list(dict.fromkeys(projection for name in names for projection in with_head(ALL_SHAPES[name])))


def some_and_all(few: list[Projection]) -> list[object]:
    rest = [each for each in cases(tuple(ALL_SHAPES)) if each not in few]
    return [*few, *(pytest.param(each, marks=pytest.mark.full) for each in rest)]


def label(value: object) -> str:
    return f"{value.name} {value.n}x{value.k}" if isinstance(value, Projection) else str(value)


each_product = pytest.mark.parametrize("product", some_and_all(cases(FEW)), ids=label)
each_of_all_tiles = pytest.mark.parametrize(
    "product", [pytest.param(each, marks=pytest.mark.full) for each in cases(ALL_TILES)], ids=label
)


class Operands(NamedTuple):
    """x [MOST_ROWS, K] and W [N, K], the float32 sums of the first 128 rows, and zeros for kernels that share out K."""

    x: torch.Tensor
    linear: Affine
    sums: torch.Tensor
    counters: torch.Tensor


@cache
def _of(n: int, k: int) -> Operands:
    generator = torch.Generator("cuda").manual_seed(n + k)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    x, w = random(MOST_ROWS, k), random(n, k) * k**-0.5
    counters = torch.zeros(n, dtype=torch.int32, device="cuda")
    linear = Affine(w, random(n), num_slices(n, k))
    return Operands(x, linear, library_sums(x[:128], linear), counters)


def operands(product: Projection) -> Operands:
    """Return those of the product; only the newest are kept."""
    if _of.cache_info().currsize > 1:
        _of.cache_clear()
        torch.cuda.empty_cache()
    return _of(product.n, product.k)


def library_sums(x: torch.Tensor, linear: Affine) -> torch.Tensor:
    """Return the sums of the slices, added in their order."""
    step = slice_columns(x.shape[1], linear.slices)
    parts = zip(x.split(step, 1), linear.w.split(step, 1), strict=True)
    return functools.reduce(torch.add, (torch.mm(a, b.t(), out_dtype=torch.float32) for a, b in parts))


def chosen(product: Projection, rows: int) -> list[Tile]:
    """Return the tile that multiplies so many rows; none where the library does."""
    tile = cost.choose(product.product(tiles.bucket(rows)))
    return [] if tile is None else [tile]


def considered(product: Projection, rows: int) -> list[Tile]:
    return list(dict.fromkeys([*chosen(product, rows), *cost.candidates(product.product(tiles.bucket(rows)))]))


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, told: object) -> None:
    as_integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    differ = found.contiguous().view(as_integers) != expected.contiguous().view(as_integers)
    if differ.any():
        share, largest = differ.float().mean().item(), (found.float() - expected.float()).abs().max().item()
        pytest.fail(f"{told}: {share:.2%} of the numbers differ, by {largest:.3g} at most")


@each_product
def test_the_library_adds_as_it_does_for_one_row_count(product: Projection) -> None:
    x, linear, sums, _ = operands(product)
    for rows in LIBRARY_ROWS:
        if product.epilogue == "head" and rows > 512:
            break
        few = min(rows, len(sums))
        assert_same_bits(library_sums(x[:rows], linear)[:few], sums[:few], f"mm in float32, {rows} rows")
        if linear.slices > 1:
            continue
        in_16_bits = torch.mm(x[:rows], linear.w.t())[:few]
        assert_same_bits(in_16_bits, sums[:few].bfloat16(), f"mm, {rows} rows")
        onto = linear.b.expand(rows, -1).clone().addmm_(x[:rows], linear.w.t())[:few]
        twice = sums[:few].bfloat16() + linear.b
        assert_same_bits(onto, twice, f"addmm_, {rows} rows")


def check_sums(product: Projection, select: Callable[[Projection, int], list[Tile]]) -> None:
    x, linear, sums, counters = operands(product)
    for rows in ROWS:
        for tile in select(product, rows):
            # Float32 sums do not fit beside the ring of `wide16.py`, whose bits test_wide16_on_gpu.py compares.
            if tile == tiles.WIDE16:
                continue
            found = torch.empty((rows, product.n), dtype=torch.float32, device="cuda")
            launch(head.LOGITS, tile, linear._replace(b=None), x[:rows], found, counters=counters)
            assert_same_bits(found, sums[:rows], f"{tile}, {rows} rows")


@each_product
def test_the_chosen_tiles_add_as_the_library_does(product: Projection) -> None:
    check_sums(product, chosen)


@each_of_all_tiles
def test_every_tile_adds_as_the_library_does(product: Projection) -> None:
    check_sums(product, considered)


#: (x, a tile or None for the library) -> the product's own result.
End = Callable[[torch.Tensor, Tile | None], torch.Tensor]


def rows_of(**state: object) -> SimpleNamespace:
    """Return what the library's way reads of a workspace: no sum over ranks is on its way."""
    return SimpleNamespace(pieces=lambda: [slice(None)], **state)


def ends(product: Projection) -> End | None:
    """Return None for the head, whose result is the sums."""
    _, linear, _, counters = operands(product)
    layer = DenseOperands(linear.w, linear.b, linear.slices)

    def add(x: torch.Tensor, tile: Tile | None) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(1)
        h = torch.randn((128, product.n), generator=generator, device="cuda").bfloat16().repeat(-(-len(x) // 128), 1)
        changed = stream(h[: len(x)].clone()) if tile else rows_of(h=h[: len(x)], outdated=lambda: None)
        if tile:
            add_launch(changed, x, linear, tile, counters)
        else:
            AddResidual().library(layer, changed, x)
        return changed.h

    def swiglu(x: torch.Tensor, tile: Tile | None) -> torch.Tensor:
        y = torch.empty((len(x), product.n // 2), dtype=x.dtype, device="cuda")
        if tile:
            swiglu_launch(stream(x), linear, Gate(EPS), y, tile, counters)
        else:
            SwiGLU(product.span, EPS).library(layer, rows_of(h=x, y=y))
        return y

    def heads(x: torch.Tensor, tile: Tile | None) -> torch.Tensor:
        out = head_output(product, len(x))
        if tile:
            qkv_launch(stream(x), linear, EPS, out, tile, counters)
        else:
            work = rows_of(h=x, q=out.q, rotation=out.rotation)
            Rotary(product.span, EPS, out.norms).library(layer, work, out.cache, 0)
        return torch.cat((out.q.flatten(), out.cache.flatten())).view(torch.int16).float()

    return {"add": add, "swiglu": swiglu, "rotary": heads, "normed": heads}.get(product.epilogue)


def head_output(product: Projection, rows: int) -> HeadOutput:
    """Each token's keys go to a block of its own."""
    (queries, kv), dim = product.heads, 2 * product.span
    generator = torch.Generator("cuda").manual_seed(2)
    positions = torch.arange(rows, device="cuda") * 37 % 4096
    angles = torch.rand((4096, dim // 2), generator=generator, device="cuda") * 6
    rotation = Rotation(angles.cos(), angles.sin(), positions, torch.arange(1, rows + 1, device="cuda") * BLOCK_SIZE)
    cache = torch.zeros((rows + 1, 1, 2, kv, BLOCK_SIZE, dim), dtype=torch.bfloat16, device="cuda")
    norms = torch.rand((2, dim), generator=generator, device="cuda").bfloat16()
    q = torch.empty((rows, queries * dim), dtype=torch.bfloat16, device="cuda")
    return HeadOutput(q, cache, 0, rotation, (norms[0], norms[1]) if product.epilogue == "normed" else None)


def parts_of(result: torch.Tensor, product: Projection, rows: int, count: int) -> torch.Tensor:
    """Return what the first `count` of the rows have got."""
    if product.epilogue not in ("rotary", "normed"):
        return result[:count]
    (queries, kv), dim = product.heads, 2 * product.span
    num_q = rows * queries * dim
    cache = result[num_q:].view(rows + 1, 2, kv, BLOCK_SIZE, dim)[1 : count + 1, :, :, 0]
    return torch.cat((result[:num_q].view(rows, -1)[:count].flatten(), cache.flatten()))


def check_ends(product: Projection, select: Callable[[Projection, int], list[Tile]]) -> None:
    """Every tile at every number of rows, and the library at more, gives the rows before the same bits."""
    x, *_ = operands(product)
    end = ends(product)
    if end is None:
        pytest.skip("the head's result is its sums")
    previous: tuple[torch.Tensor, int] | None = None
    cases = [(rows, tile) for rows in ROWS for tile in [*select(product, rows), None]]
    for rows, tile in [*cases, (200, None), (600, None)]:
        # The rest of the bucket belongs to no row.
        found = end(x[:rows], tile)
        if previous is not None:
            expected, count = previous
            told = f"{tile or 'library'}, {rows} rows against {count}"
            assert_same_bits(parts_of(found, product, rows, count), parts_of(expected, product, count, count), told)
        previous = found, rows


@each_product
def test_the_chosen_tiles_give_a_row_the_same_end_at_any_number_of_rows(product: Projection) -> None:
    check_ends(product, chosen)


@each_of_all_tiles
def test_every_tile_gives_a_row_the_same_end_at_any_number_of_rows(product: Projection) -> None:
    check_ends(product, considered)


@each_product
def test_a_product_is_added_to_h_after_the_bias(product: Projection) -> None:
    x, linear, sums, counters = operands(product)
    if product.epilogue != "add":
        pytest.skip("nothing is added")
    h = torch.randn((128, product.n), generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    for rows in ROWS:
        for tile in chosen(product, rows):
            found = stream(h[:rows].clone())
            add_launch(found, x[:rows], linear, tile, counters)
            expected = sums[:rows].bfloat16() + (h[:rows] + linear.b)
            assert_same_bits(found.h, expected, f"{tile}, {rows} rows")
