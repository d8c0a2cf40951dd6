"""The kernels of attention over latents, compiled ahead of time for sm_90 at the sizes of DeepSeek-V2-Lite."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from photon_grpc.kernels.attention import latent
from photon_grpc.kernels.attention.latent import LaneParts
from photon_grpc.kernels.attention.spec import AttentionSpec
from tests.kernels.test_compile import NAMES, check, compiled

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

PARTS = LaneParts("*fp32", "*fp32", "*fp32")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)])
@pytest.mark.parametrize("parts", [None, PARTS])
def test_attention(dtype: torch.dtype, parts: LaneParts | None) -> None:
    kind = "*" + NAMES[dtype]
    config = latent.config(AttentionSpec(16, 0.1, dtype, 512), 576, 64, 64)
    types: dict[str, Any] = {"q": kind, "pages": kind, "out": kind, "parts": parts, "query_start": "*i32"}
    types |= {"context_len": "*i32", "tables": "*i32", "num_rows": "i32", "scale": "fp32", "block_stride": "i64"}
    types |= {"table_stride": "i32"}
    is_half = dtype != torch.float32
    check(compiled(latent.latent_kernel, types, config), "mma" if is_half else "fma", 0 if is_half else 1 << 16)


def test_merging_and_writing() -> None:
    names = ("NUM_HEADS", "RANK", "RANK_PAD", "ROWS_PAD", "LANE", "HEADS")
    config = latent.config(AttentionSpec(16, 0.1, torch.bfloat16, 512), 576, 64, 64)
    types: dict[str, Any] = {"parts": PARTS, "out": "*bf16", "query_start": "*i32", "context_len": "*i32"}
    types |= {"num_rows": "i32", "num_lanes": "i32"}
    check(compiled(latent.merge_kernel, types, {name: config[name] for name in names} | {"num_warps": 4}))
    types = {"latent": "*bf16", "pages": "*bf16", "slot_mapping": "*i64", "block_stride": "i64"}
    types |= {"layer_offset": "i64", "token_stride": "i64"}
    check(compiled(latent.write_latent_kernel, types, {"WIDTH": 576, "WIDTH_PAD": 1024, "BLOCK_SIZE": 64}))
