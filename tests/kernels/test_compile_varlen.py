"""The prompt attention of Hopper compiled ahead of time, in every shape it is launched with.

None spills, all fit, and the intended units are used.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from photon_grpc.kernels.attention import hopper_varlen
from photon_grpc.kernels.attention.gluon_decode import PageShape
from photon_grpc.kernels.attention.hopper_ring import BOX_COLUMNS, page_layout
from photon_grpc.kernels.attention.hopper_varlen import STAGES, varlen_tile_kernel
from photon_grpc.kernels.attention.key_order import ORDERS
from tests.kernels.test_compile import NAMES, Compiled, check
from tests.kernels.test_compile_fused import compiled_gluon

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")


def varlen_tile(shape: PageShape, kind: str, consumers: int, max_spilled_bytes: int = 0) -> Compiled:
    tile = hopper_varlen.tile(shape, consumers)
    types: dict[str, Any] = dict.fromkeys(["q", "out"], "*" + kind)
    types |= {"rows": ("*i32", "*i32", "*i32"), "places": ("i32", "i32", "i32")}
    types["scales"] = None
    if shape.CHUNK == 8:
        box = min(shape.BLOCK_SIZE, tile.BN), BOX_COLUMNS
        types["cache"] = f"tensordesc<{kind}[{box[0]}, {box[1]}],{page_layout()!r}>"
    else:
        types |= {"cache": "*i32", "scales": "*fp32"}
    built = compiled_gluon(varlen_tile_kernel, {"SHAPE": shape, "TILE": tile}, 4, **types)
    check(built, "wgmma.mma_async", max_spilled_bytes)
    assert ("cp.async.bulk.tensor.2d" in built.ptx) == (shape.CHUNK == 8)
    # Each consumer's four warps hold the registers that the launcher shares out.
    registers = tile.CONSUMER_REGISTERS if consumers > 1 else 256
    assert re.search(rf"setmaxnreg.inc\S*\s+{registers};", built.ptx)
    return built


#: Other numbers take the same registers.
HALF = pytest.param(torch.float16, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("block_size", "window"), [(64, 0), (16, 512), pytest.param(128, 0, marks=pytest.mark.full)]
)  # fmt: skip
@pytest.mark.parametrize(("head_dim", "consumers"), STAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF], ids=str)
def test_varlen_tile(dtype: torch.dtype, head_dim: int, consumers: int, block_size: int, window: int) -> None:
    if consumers not in hopper_varlen.numbers_of_consumers(PageShape(8, 4, head_dim, block_size, window)):
        pytest.skip("not launched")
    # Three consumers of wide heads keep a few numbers on the stack.
    spare = 64 if (head_dim, consumers) == (128, 3) else 0
    varlen_tile(PageShape(8, 4, head_dim, block_size, window), NAMES[dtype], consumers, max_spilled_bytes=spare)


@pytest.mark.parametrize(("block_size", "window"), [pytest.param(64, 0, marks=pytest.mark.full), (16, 512)])
@pytest.mark.parametrize(("head_dim", "consumers"), hopper_varlen.REGISTERS_OF_8_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF], ids=str)
def test_pages_of_8_bits(dtype: torch.dtype, head_dim: int, consumers: int, block_size: int, window: int) -> None:
    shape = PageShape(8, 4, head_dim, block_size, window, CHUNK=16)
    assert consumers in hopper_varlen.numbers_of_consumers(shape)
    varlen_tile(shape, NAMES[dtype], consumers)


@pytest.mark.parametrize(("group", "block_size"), [(7, 16), (3, 8), (16, 1024)])
@pytest.mark.parametrize(("head_dim", "consumers"), [(64, 3), (128, 2), (256, 1)])
def test_groups_that_leave_pairs_idle_and_small_pages(
    head_dim: int, consumers: int, group: int, block_size: int
) -> None:
    built = varlen_tile(PageShape(8, group, head_dim, block_size), "bf16", consumers, max_spilled_bytes=32)
    # Keys, values, and values at the end of a context are copied in boxes of a page and 64 columns.
    boxes = ORDERS[head_dim].UPDATE // min(block_size, ORDERS[head_dim].UPDATE)
    assert built.ptx.count("cp.async.bulk.tensor.2d") == 3 * boxes * head_dim // 64


def test_three_consumers_of_heads_of_128_are_for_plain_shapes() -> None:
    assert hopper_varlen.numbers_of_consumers(PageShape(8, 4, 128, 64)) == [2, 3]
    for shape in (PageShape(8, 7, 128, 64), PageShape(8, 4, 128, 16), PageShape(8, 4, 128, 64, WINDOW=512)):
        assert hopper_varlen.numbers_of_consumers(shape) == [2]


@pytest.mark.parametrize(("num_tokens", "consumers"), [(512, 2), (1024, 2), (2048, 3), (8192, 3)])
def test_small_batches_are_cut_finer(num_tokens: int, consumers: int) -> None:
    assert hopper_varlen.num_consumers(num_tokens * 4, PageShape(8, 4, 64, 64), 132) == consumers
    assert hopper_varlen.num_consumers(num_tokens * 4, PageShape(8, 4, 128, 64), 132) == consumers
    assert hopper_varlen.num_consumers(num_tokens * 4, PageShape(8, 4, 256, 64), 132) == 1
