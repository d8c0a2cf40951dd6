"""Products of 16-bit weights with steps shared out, on CUDA: the bits of the 16-bit kernel of few rows, in every row.

python -m pytest -m gpu tests/gpu/kernels/test_wide16_on_gpu.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.gluon import has_wgmma
from photon_grpc.kernels.lang.precompile import launches_collected, run_in_forks
from photon_grpc.kernels.linear import epilogue, wide16
from photon_grpc.kernels.linear.fused_linear import Affine, Fusion, Gate, gated_fusion, launch, swiglu_launch
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.linear.wide16_tiles import TABLE, WideTile16
from tests.kernels.fused import EPS, stream

pytestmark = pytest.mark.gpu
PLAIN = Fusion(epilogue.load_nothing, epilogue.store_sums)
FEW = Tile("wgmma", 64, 64, 4, 4)
TILES = sorted({tile for by_rows in TABLE.values() for tile in by_rows.values()})


class Shape(NamedTuple):
    """W [n, k], and whether there is a bias."""

    n: int
    k: int
    has_bias: bool


#: More tiles than multiprocessors and fewer, columns that no step divides.
SHAPES = [Shape(28672, 4096, False), Shape(16384, 2048, True), Shape(18432, 1104, False)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile all kernels side by side."""
    if not has_wgmma(torch.device("cuda")):
        pytest.skip("the kernel is Hopper's")
    with launches_collected() as jobs:
        for shape in SHAPES:
            for tile in TILES:
                list(compare(shape, tile))
    run_in_forks(list(jobs), num_workers=os.cpu_count() or 1)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_has_the_bits_of_few_rows(shape: Shape, tile: WideTile16) -> None:
    for rows, found, expected in compare(shape, tile):
        assert torch.equal(found[:rows], expected[:rows]), rows
        assert found[rows].isnan().all(), "a row behind is written"


def compare(shape: Shape, tile: WideTile16) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield numbers of rows of x, what the kernel stores and what that of few rows does."""
    n, k, has_bias = shape
    generator = torch.Generator("cuda").manual_seed(n + k)
    w = torch.randn(n, k, generator=generator, device="cuda").bfloat16() * k**-0.5
    b = torch.randn(n, generator=generator, device="cuda").bfloat16() if has_bias else None
    linear, gate, counters = Affine(w, b), Gate(EPS), torch.zeros(1, dtype=torch.int32, device="cuda")
    whole = torch.randn(tile.rows, k, generator=generator, device="cuda").bfloat16()
    sums = torch.empty((tile.rows, n), device="cuda")
    gated = torch.empty((tile.rows, n // 2), dtype=torch.bfloat16, device="cuda")
    for first in range(0, tile.rows, 64):
        part = whole[first : first + 64].clone()
        launch(PLAIN, FEW, linear, part, sums[first : first + 64])
        swiglu_launch(stream(part), linear, gate, gated[first : first + 64], FEW, counters)
    for rows in (1, 31, 40, tile.BM, tile.rows - 1, tile.rows):
        x = whole[:rows].clone()
        y = torch.full((rows + 1, n // 2), torch.nan, dtype=torch.bfloat16, device="cuda")
        wide16.launch(gated_fusion(gate, n // 2), x, linear, y[:rows], squares.norms(x, EPS), tile)
        yield rows, y, gated
        if tile.HALVES == 1 and not tile.MORE:
            # Sums in float32 take memory beside the ring.
            y = torch.full((rows + 1, n), torch.nan, device="cuda")
            wide16.launch(PLAIN, x, linear, y[:rows], tile=tile)
            yield rows, y, sums
