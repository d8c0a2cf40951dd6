"""Products of many rows that add slices in registers: the bits of the library's sums, added in order, by every tile.

CUBLAS_WORKSPACE_CONFIG=:0:0 python -m pytest -m gpu tests/gpu/kernels/test_many_rows_on_gpu.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch

from photon_grpc.kernels.lang.gluon import has_wgmma
from photon_grpc.kernels.lang.precompile import launches_collected, run_in_forks
from photon_grpc.kernels.linear import many_rows, slices
from photon_grpc.kernels.linear.many_rows import ManyTile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":0:0", reason="the library may split K"),
]


class Shape(NamedTuple):
    """W [n, k] with K in slices, as serving cuts it or as it may be cut."""

    n: int
    k: int
    slices: int
    dtype: torch.dtype = torch.bfloat16


#: The last two have columns and rows that no tile divides, and slices whose last one is shorter.
SHAPES = [
    Shape(3072, 2048, 2),
    Shape(2048, 8192, 2, torch.float16),
    Shape(2048, 8192, 2),
    Shape(1536, 8960, 4),
    Shape(1000, 960, 4),
    Shape(8, 1152, 2),
]
ROWS = (1, 63, 64, 65, 129, 192, 200, 256, 300, 1000, 2048, 3000)


class Case:
    """Random operands, and the sums of slices by the library, added in order."""

    def __init__(self, shape: Shape) -> None:
        n, k, self.slices, dtype = shape
        generator = torch.Generator("cuda").manual_seed(n + k)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device="cuda").to(dtype)

        self.x, self.h, self.b, self.w = random(ROWS[-1], k), random(ROWS[-1], n), random(n), random(n, k) * k**-0.5
        self.sums = slices.products(self.x, self.w, self.slices)
        self.total = self.sums[0].clone()
        for part in self.sums[1:]:
            self.total += part

    def added(self, rows: int, bias: torch.Tensor | None, tile: ManyTile) -> torch.Tensor:
        found = self.h.clone()
        many_rows.add(found[:rows], self.x[:rows], self.w, bias, self.slices, tile)
        return found

    def product(self, rows: int, tile: ManyTile) -> torch.Tensor:
        return many_rows.product(self.x[:rows], self.w, self.slices, tile)


@cache
def case(shape: Shape) -> Case:
    return Case(shape)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    """Compile all kernels side by side."""
    if not has_wgmma(torch.device("cuda")):
        pytest.skip("the kernel is Hopper's")
    with launches_collected() as jobs:
        for shape in SHAPES:
            one = case(shape)
            for tile in many_rows.TILES:
                for bias in (None, one.b):
                    one.added(64, bias, tile)
                one.product(64, tile)
    torch.cuda.synchronize()
    case.cache_clear()
    run_in_forks(list(jobs), num_workers=os.cpu_count() or 1)
    yield
    case.cache_clear()


@pytest.mark.parametrize("tile", many_rows.TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_has_the_bits_of_the_library(shape: Shape, tile: ManyTile) -> None:
    one = case(shape)
    exact = one.x[:200].double() @ one.w.double().T
    assert (one.total[:200] - exact).norm() < 1e-5 * exact.norm()
    for bias in (None, one.b):
        expected = one.h.clone()
        slices.add_launch(expected, one.sums, bias)
        for rows in ROWS:
            found = one.added(rows, bias, tile)
            assert torch.equal(found[:rows].view(torch.int16), expected[:rows].view(torch.int16)), rows
            assert torch.equal(found[rows:], one.h[rows:]), "rows behind are written"
    for rows in ROWS:
        rounded = one.total[:rows].to(shape.dtype)
        assert torch.equal(one.product(rows, tile).view(torch.int16), rounded.view(torch.int16)), rows
