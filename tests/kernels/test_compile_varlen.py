"""The prompt attention of Hopper compiled ahead of time, in every shape it is launched with.

None spills, all fit, and the intended units are used.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from photon_grpc.kernels.attention import gluon_decode, hopper_varlen
from photon_grpc.kernels.attention.hopper_varlen import page_layout, varlen_tile_kernel
from tests.kernels.test_compile import MODELS, NAMES, check, one_page
from tests.kernels.test_compile_fused import compiled_gluon

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["1B", "8B"])
def test_varlen_tile(name: str, dtype: torch.dtype, consumers: int, block_size: int) -> None:
    model, kind = MODELS[name], NAMES[dtype]
    shape = gluon_decode.shape(model.q_heads // model.kv_heads, one_page(model, dtype, block_size))
    tile = hopper_varlen.tile(model.head_dim, consumers)
    types: dict[str, Any] = dict.fromkeys(["q", "out"], "*" + kind)
    types |= {"rows": ("*i32", "*i32", "*i32"), "places": ("i32", "i32", "i32")}
    types["cache"] = f"tensordesc<{kind}[{min(block_size, tile.BN)}, {model.head_dim}],{page_layout()!r}>"
    built = compiled_gluon(varlen_tile_kernel, {"SHAPE": shape, "TILE": tile}, 4, **types)
    check(built, "wgmma.mma_async")
    assert "cp.async.bulk.tensor.2d" in built.ptx
    # Each consumer's four warps hold the registers that the launcher shares out.
    assert re.search(rf"setmaxnreg.inc\S*\s+{tile.CONSUMER_REGISTERS};", built.ptx)


@pytest.mark.parametrize(("num_tokens", "consumers"), [(512, 2), (1024, 2), (2048, 3), (8192, 3)])
def test_small_batches_are_cut_finer(num_tokens: int, consumers: int) -> None:
    assert hopper_varlen.num_consumers(num_tokens * 4, 8, multiprocessors=132) == consumers
