"""The kernels of attention over latents, compiled ahead of time for sm_90 at the sizes of DeepSeek-V2-Lite."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from photon_grpc.kernels.attention import latent, latent_queries, latent_ring, latent_values
from photon_grpc.kernels.attention.latent_queries import LatentOutput
from photon_grpc.kernels.attention.latent_values import LaneParts
from photon_grpc.kernels.attention.spec import AttentionSpec
from photon_grpc.kernels.rotary.rotate_store import Rotation
from tests.kernels.test_compile import NAMES, check, compiled, kept_report
from tests.kernels.test_compile_fused import compiled_gluon

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")

PARTS = LaneParts("*fp32", "*fp32", "*fp32", "*i32")  # type: ignore[arg-type]
SPEC = AttentionSpec(16, 0.1, torch.bfloat16, 512)
PAGES = torch.empty(1, 1, 1, 1, 64, 576, device="meta")
ROTATION = Rotation("*fp32", "*fp32", "*i64", "*i64")  # type: ignore[arg-type]
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)])


@each_dtype
@pytest.mark.parametrize("parts", [None, PARTS])
def test_attention(dtype: torch.dtype, parts: LaneParts | None) -> None:
    kind, is_half = "*" + NAMES[dtype], dtype != torch.float32
    tile = latent.tile_of(SPEC._replace(dtype=dtype), PAGES, 64, has_long_rows=parts is None)
    types: dict[str, Any] = {"q": kind, "pages": kind, "out": kind, "parts": parts, "query_start": "*i32"}
    types |= {"context_len": "*i32", "tables": "*i32", "num_rows": "i32", "scale": "fp32", "block_stride": "i64"}
    constants = {"C": tile, "PDL": True} | latent.options(dtype)
    instruction = "mma" if is_half else "fma"
    found = compiled(latent.latent_kernel, types | {"table_stride": "i32"}, constants)
    check(found, instruction, 0 if is_half else 1 << 16)


@pytest.mark.parametrize("block_size", [64, pytest.param(16, marks=pytest.mark.full)])
@pytest.mark.parametrize(("parts", "is_one"), [(None, False), (PARTS, True), (PARTS, False)])
def test_attention_by_a_ring(parts: LaneParts | None, is_one: bool, block_size: int) -> None:
    pages = torch.empty(1, 1, 1, 1, block_size, 576, device="meta")
    tile = latent.tile_of(SPEC, pages, 64, has_long_rows=parts is None)
    box = latent_ring.box_rows(block_size, latent_ring.KEYS)
    columns = 512 if box == latent_ring.KEYS else 64
    types: dict[str, Any] = {"q": "*bf16"}
    for name, width in (("of_plain", columns), ("of_rotated", 64)):
        types[name] = f"tensordesc<bf16[{box}, {width}],{latent_ring.swizzled()!r}>"
    types |= {"out": "*bf16", "parts": parts, "query_start": "*i32", "context_len": "*i32", "tables": "*i32"}
    types |= {"num_rows": "i32", "num_lanes": "i32", "scale": "fp32", "places": ("i32", "i32"), "table_stride": "i32"}
    warps = latent_ring.num_warps(block_size, merges=parts is None)
    constants = {"C": tile, "IS_ONE": is_one, "WARPS": warps, "PDL": True}
    found = compiled_gluon(latent_ring.latent_ring_kernel, constants, warps, **types)
    check(found, "wgmma.mma_async")
    # Keys of earlier steps are on their way before the kernel waits for those of this one.
    before_wait, behind = found.ptx.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor.2d" in before_wait and "cp.async.bulk.tensor.2d" in behind
    assert "st.global" not in before_wait
    assert "serialized" not in kept_report(found.ptx)


@pytest.mark.parametrize("num_tokens", [1, 16, 32, 2048])
@pytest.mark.parametrize("parts", [None, PARTS])
def test_values(num_tokens: int, parts: LaneParts | None) -> None:
    tile = latent_values.tile_of(num_tokens, (16, 512, 128, 128), 2, has_parts=parts is not None)
    types: dict[str, Any] = {"o": None if parts else "*bf16", "parts": parts, "weight": "*bf16", "out": "*bf16"}
    types |= {"num_tokens": "i32", "num_lanes": "i32"}
    check(compiled(latent_values.value_kernel, types, {"C": tile, "PDL": True, "num_warps": 8}), "mma")
    if parts:
        types["weight"] = None
        constants = {"C": tile._replace(BV=0, LANES=1), "PDL": True, "num_warps": 8}
        check(compiled(latent_values.value_kernel, types, constants))


@pytest.mark.parametrize("num_tokens", [1, 2048])
def test_queries(num_tokens: int) -> None:
    q, weight = torch.empty(1, 16 * 576, dtype=torch.bfloat16, device="meta"), torch.empty(4096, 512, device="meta")
    out = LatentOutput(q, PAGES, 0, ROTATION, (weight, 1e-6), weight, 128)
    tile = latent_queries.tile_of(num_tokens, 2048, 1, out)
    types: dict[str, Any] = {"sums": "*bf16", "partial": "*fp32", "weight": "*bf16", "norm": "*bf16", "q": "*bf16"}
    types |= {"pages": "*bf16", "rotation": ROTATION, "num_tokens": "i32", "slice_stride": "i64", "block_stride": "i64"}
    types |= {"eps": "fp32", "latent_eps": "fp32"}
    check(compiled(latent_queries.query_kernel, types, {"C": tile, "PDL": True, "num_warps": 4}), "mma")


def test_writing() -> None:
    types = {"latent": "*bf16", "pages": "*bf16", "slot_mapping": "*i64", "block_stride": "i64"}
    types |= {"layer_offset": "i64", "token_stride": "i64"}
    constants = {"WIDTH": 576, "WIDTH_PAD": 1024, "BLOCK_SIZE": 64, "PDL": True}
    check(compiled(latent.write_latent_kernel, types, constants))
