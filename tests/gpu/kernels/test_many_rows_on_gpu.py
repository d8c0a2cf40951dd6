"""Products of many rows that add slices in registers: the bits of the library's sums, added in order, by every tile.

CUBLAS_WORKSPACE_CONFIG=:0:0 python -m pytest -m gpu tests/gpu/kernels/test_many_rows_on_gpu.py
"""

from __future__ import annotations

import os

import pytest
import torch

from photon_grpc.kernels.lang.gluon import has_wgmma
from photon_grpc.kernels.linear import many_rows, slices
from photon_grpc.kernels.linear.many_rows import ManyTile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":0:0", reason="the library may split K"),
]
#: N, K, slices: as serving cuts them; more slices than it takes; columns and rows that no tile divides.
SHAPES = [(3072, 2048, 2), (2048, 8192, 2), (1536, 8960, 4), (960, 2560, 1), (1000, 960, 4), (8, 1152, 2)]
ROWS = (1, 63, 64, 65, 129, 192, 200, 256, 300, 1000, 2048, 3000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", many_rows.TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_has_the_bits_of_the_library(
    shape: tuple[int, int, int], tile: ManyTile, dtype: torch.dtype
) -> None:
    if not has_wgmma(torch.device("cuda")):
        pytest.skip("the kernel is Hopper's")
    n, k, number = shape
    torch.manual_seed(n)
    most = ROWS[-1]
    x, h = (torch.randn(most, size, device="cuda").to(dtype) for size in (k, n))
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)
    b = torch.randn(n, device="cuda").to(dtype)
    sums = slices.products(x, w, number)
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    exact = x[:200].double() @ w.double().T
    assert (total[:200] - exact).norm() < 1e-5 * exact.norm()
    for bias in (None, b):
        added = h.clone()
        slices.add_launch(added, sums, bias)
        for rows in ROWS:
            found = h.clone()
            many_rows.add(found[:rows], x[:rows], w, bias, number, tile)
            assert torch.equal(found[:rows], added[:rows]), rows
            assert torch.equal(found[rows:], h[rows:]), "rows behind are written"
    for rows in ROWS:
        found = many_rows.product(x[:rows], w, number, tile)
        assert torch.equal(found.view(torch.int16), total[:rows].to(dtype).view(torch.int16)), rows
