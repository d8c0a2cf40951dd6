"""The kernel that exchanges parts between GPUs, compiled ahead of time for sm_90: no spills, fits, volatile reads.

Needs Triton and its ptxas, no GPU.
"""

from __future__ import annotations

import os

import pytest

from photon_grpc.kernels.linear import exchange
from tests.kernels.test_compile import check, compiled

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs the compiler")


@pytest.mark.parametrize(
    ("hidden", "size", "has_bias", "pushes"), [(4096, 2, False, True), (2048, 2, True, True), (8192, 4, False, False)]
)
def test_exchange_fits_and_reads_what_others_write(hidden: int, size: int, has_bias: bool, pushes: bool) -> None:
    types = {
        "h": "*bf16", "part": "*fp32", "bias": "*bf16" if has_bias else None, "squares": "*fp32",
        "inboxes": ("*i32",) * size,
    }  # fmt: skip
    meta = {"HIDDEN": hidden, "ROWS": 512, "RANK": 1, "SIZE": size, "PUSHES": pushes, "PDL": pushes}
    built = compiled(exchange.exchange_kernel, types, meta | {"LOOKS": exchange.LOOKS} | exchange.config())
    check(built)
    assert "ld.volatile.global" in built.ptx and "trap;" in built.ptx
