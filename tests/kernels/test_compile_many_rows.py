"""The product of many rows compiled ahead of time for sm_90, by every tile: none spills, all fit, nothing is serial."""

from __future__ import annotations

import os
from typing import Any

import pytest

from photon_grpc.kernels.linear import many_rows
from photon_grpc.kernels.linear.many_rows import ManyProblem, ManyTile, many_rows_kernel
from tests.kernels.test_compile import Compiled, check, kept_report
from tests.kernels.test_compile_fused import compiled_gluon

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")
#: The 1B's qkv and down; four slices; a last slice of 192 columns, rows that no tile divides.
PROBLEMS = [
    ManyProblem(3072, 2048, 2, ADDS=False),
    ManyProblem(2048, 8192, 2, ADDS=True),
    ManyProblem(1536, 8960, 4, ADDS=True),
    ManyProblem(1000, 960, 4, ADDS=False),
]


def built(problem: ManyProblem, tile: ManyTile, kind: str, bias: str | None = None) -> Compiled:
    types: dict[str, Any] = {"to": ("*" + kind, bias)}
    for name, rows in (("x", many_rows.GROUP_ROWS), ("w", many_rows.HALF_ROWS * tile.HALVES)):
        types[name] = f"tensordesc<{kind}[{rows}, {many_rows.STEP}],{many_rows.step_layout()!r}>"
    return compiled_gluon(many_rows_kernel, {"P": problem, "TILE": tile}, 4, **types)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("tile", many_rows.TILES, ids=str)
def test_every_tile(tile: ManyTile, problem: ManyProblem) -> None:
    found = built(problem, tile, "bf16", "*bf16" if problem.ADDS else None)
    check(found, "wgmma.mma_async")
    assert "cp.async.bulk.tensor.2d" in found.ptx
    assert "serialized" not in kept_report(found.ptx)
    # Results are written eight at a time.
    assert "st.global.v4" in found.ptx


def test_in_float16() -> None:
    check(built(PROBLEMS[1], next(iter(many_rows.TILES)), "fp16"), "wgmma.mma_async")
