"""Products of 16-bit weights with steps shared out, compiled ahead of time for sm_90: none spills, all fit."""

from __future__ import annotations

import os
from typing import Any

import pytest

from photon_grpc.kernels.linear import wide16, wide16_tiles
from photon_grpc.kernels.linear.boxes import box_layout
from photon_grpc.kernels.linear.tiles import Problem
from photon_grpc.kernels.linear.wide16_tiles import TABLE, WideTile16
from tests.kernels.test_compile import Compiled, check, kept_report
from tests.kernels.test_compile_fused import EPILOGUES, OPERANDS, compiled_gluon

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
TILES = sorted({tile for by_rows in TABLE.values() for tile in by_rows.values()})


def described(box: list[int]) -> str:
    return f"tensordesc<bf16{box},{box_layout(len(box), 16, 128)!r}>"


def built(end: str, n: int, k: int, span: int, tile: WideTile16) -> Compiled:
    load, store = EPILOGUES[end]
    rows = wide16.rows_at_once(span, tile.HALVES)
    constants: dict[str, Any] = {"bias": None, "LOAD": load, "STORE": store, "P": Problem(n, k, tile.BM, span)}
    constants |= {"TILE": wide16.TILE, "W": tile, "PDL": True}
    absent = [] if end in OPERANDS else ["operands"]
    absent += [] if tile.IS_HANDED else ["handed"]
    absent += [] if end == "swiglu" else ["norms"]
    types: dict[str, Any] = {"w": described([1, rows // 16, 2, 8, 64] if span else [rows, 64])}
    types |= {"x": described([wide16_tiles.BOX, 64]), "whole_x": described([tile.BM, 64]), "y": "*bf16"}
    types |= {"norms": "*fp32", "handed": ("*fp32", "*i32"), "operands": OPERANDS.get(end)}
    return compiled_gluon(wide16.wide16_kernel, constants | dict.fromkeys(absent), wide16.TILE.KW, **types)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", [("swiglu", 28672, 4096, 14336), ("plain", 6144, 4096, 0)], ids=str)
def test_every_tile(shape: tuple[str, int, int, int], tile: WideTile16) -> None:
    found = built(*shape, tile)
    check(found, "wgmma.mma_async")
    assert "cp.async.bulk.tensor" in found.ptx
    assert "setmaxnreg.dec" in found.ptx
    assert "serialized" not in kept_report(found.ptx)
