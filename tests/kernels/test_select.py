"""The implementation that is chosen, and that the package works without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest

from photon_grpc.kernels import TORCH, TRITON, select
from photon_grpc.kernels.lang.jit import triton


def test_a_cpu_gets_the_references() -> None:
    assert select("auto", "cpu") is TORCH
    assert select("torch", "cpu") is TORCH
    assert select("torch", "cuda:0") is TORCH


@pytest.mark.skipif(triton is None, reason="triton is not installed")
def test_cuda_gets_triton_unless_told_otherwise() -> None:
    assert select("auto", "cuda") is TRITON
    assert select("triton", "cuda:1") is TRITON


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'triton' cannot run on cpu"):
        select("triton", "cpu")
    with pytest.raises(ValueError, match="expected auto, torch or triton"):
        select("cutlass", "cpu")  # type: ignore[arg-type]


def test_without_triton_every_operation_answers_with_its_reference() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
from photon_grpc.kernels import TORCH, TRITON, select
assert select("auto", "cuda") is TORCH and select("auto", "cpu") is TORCH
x = torch.randn(2, 64)
w = torch.ones(64)
assert torch.equal(TRITON.rms_norm(x, w, 1e-5), TORCH.rms_norm(x, w, 1e-5))
assert torch.equal(TRITON.swiglu(x), TORCH.swiglu(x))
try:
    select("triton", "cuda")
except ValueError as error:
    assert "not installed" in str(error)
else:
    raise SystemExit("triton was selected")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
