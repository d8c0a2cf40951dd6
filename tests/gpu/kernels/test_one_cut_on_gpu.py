"""Products of every tile and of the matrix library on CUDA: the same bits, for every weight and number of rows.

The library must not split K: CUBLAS_WORKSPACE_CONFIG is set before CUDA starts.

    CUBLAS_WORKSPACE_CONFIG=:0:0 python -m pytest -m gpu tests/gpu/kernels/test_one_cut_on_gpu.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.linear import cost, cut, tiles
from photon_grpc.kernels.linear.cost import Product
from photon_grpc.kernels.linear.tiles import Tile
from photon_grpc.kernels.rotary.rotate_store import Rotation
from photon_grpc.layers.epilogues import AddResidual, Epilogue, Rotary, SwiGLU
from photon_grpc.layers.epilogues import bucket as bucket_of
from photon_grpc.layers.operands import DenseOperands
from photon_grpc.layers.workspace import RowSums, Workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("CUBLAS_WORKSPACE_CONFIG") != ":0:0", reason="the library may split K"),
]
#: Hidden size, query heads, key heads, head_dim, intermediate size.
SHAPES = {
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192),
    "Llama-3.1-8B": (4096, 32, 8, 128, 14336),
    "SmolLM2-360M": (960, 15, 5, 64, 2560),
    "Qwen2.5-0.5B": (896, 14, 2, 64, 4864),
    "Qwen2.5-1.5B": (1536, 12, 2, 128, 8960),
    "Qwen3-4B": (2560, 32, 8, 128, 9728),
    "1152 wide": (1152, 4, 1, 256, 6912),
}
ROWS = (1, 2, 3, 8, 9, 16, 17, 31, 33, 64, 65, 100, 128, 129, 256, 512)
MOST = 700
BLOCK_SIZE = 64
Shape = tuple[int, int, int, int, int]


class Case:
    """One projection of a layer with its epilogue, and the rows it is applied to."""

    def __init__(self, shape: Shape, name: str, *, bias: bool = False, is_normed: bool = False) -> None:
        self.shape, self.name = shape, name
        hidden, heads, kv, dim, inner = shape
        n, k = {
            "qkv": ((heads + 2 * kv) * dim, hidden),
            "output": (hidden, heads * dim),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }[name]
        self.epilogue: Epilogue = AddResidual()
        if name == "qkv":
            weights = (torch.rand(2, dim, device="cuda") + 0.5).bfloat16()
            self.epilogue = Rotary(dim // 2, 1e-5, (weights[0], weights[1]) if is_normed else None)
        elif name == "gate_up":
            self.epilogue = SwiGLU(inner, 1e-5)
        weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()
        b = torch.randn(n, device="cuda").bfloat16() if bias else None
        self.linear = DenseOperands(weight, b, cut.num_slices(n, k))
        self.h, self.x = (torch.randn(MOST, size, device="cuda").bfloat16() for size in (hidden, k))
        angle = torch.rand(MOST, dim // 2, device="cuda") * 6
        place = torch.arange(MOST, device="cuda")
        self.rotation = Rotation(angle.cos(), angle.sin(), place, place + BLOCK_SIZE)
        self.pages = torch.zeros(MOST // BLOCK_SIZE + 3, 1, 2, kv, BLOCK_SIZE, dim, device="cuda").bfloat16()

    def __call__(self, rows: int, tile: Tile | None) -> torch.Tensor:
        """Return what is written for each of the first rows: [rows, …]."""
        hidden, heads, _, dim, inner = self.shape
        bucket = bucket_of(rows)

        def room(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.full((max(bucket, rows), size), torch.nan, dtype=dtype, device="cuda")[:rows]

        sums = RowSums(room(hidden // squares.GROUP, torch.float32))
        work = Workspace(
            bucket, room(hidden), sums, room(heads * dim), room(0), room(inner), self.rotation,
            torch.zeros(65536, dtype=torch.int32, device="cuda"),
        )  # fmt: skip
        work.take(self.h[:rows], None)
        multiply = self.epilogue.tiled if tile else self.epilogue.library
        given = (self.linear, tile, work) if tile else (self.linear, work)
        if self.name == "qkv":
            self.pages.zero_()
            multiply(*given, self.pages, 0)
            stored = self.pages[1:, 0].permute(0, 3, 1, 2, 4).flatten(0, 1)[:rows]
            return torch.cat((work.q, stored.flatten(1)), dim=1)
        if self.name == "gate_up":
            multiply(*given)
            return work.y
        x = room(self.x.shape[1])
        multiply(*given, x.copy_(self.x[:rows]))
        return torch.cat((work.h.float(), work.stream().partial), dim=1)

    def tiles(self, rows: int) -> Iterator[Tile]:
        """Return the table's and some of those that are considered, the best and the worst among them."""
        n, k = self.linear.weight.shape
        product = Product(n, k, rows, self.epilogue.span, self.epilogue.cost, self.linear.num_slices)
        known = tiles.TABLE.get((n, k), {}).get(rows)
        found = sorted(cost.candidates(product), key=lambda tile: cost.tile_us(tile, product))
        yield from dict.fromkeys(([known] if known else []) + found[:2] + found[len(found) // 2 :][:1] + found[-1:])


@pytest.mark.parametrize("what", ["qkv", "qkv, bias", "qkv, norms", "output", "output, bias", "gate_up", "down"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_of_a_product_has_the_same_bits_by_every_kernel_and_in_any_company(name: str, what: str) -> None:
    torch.manual_seed(0)
    case = Case(SHAPES[name], what.split(",")[0], bias="bias" in what, is_normed="norms" in what)
    expected = case(MOST, None)
    assert not expected.isnan().any()
    for rows in ROWS:
        bucket = bucket_of(rows)
        for tile in (None, *(case.tiles(bucket) if bucket else ())):
            assert torch.equal(case(rows, tile), expected[:rows]), (rows, tile)
