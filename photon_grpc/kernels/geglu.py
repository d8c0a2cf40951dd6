"""GeGLU for gate and up side by side in one tensor, y = round(gelu(gate)) · up, rounded as transformers does.

    gelu(a) = a / 2 · (1 + tanh(z)) = a / (1 + exp(-2z)),  z = sqrt(2 / π) · (a + 0.044715 · a³)

Shapes: gate_up [T, 2·I] (gate first; rows may be strided) -> y [T, I]. bf16, fp16, fp32; arithmetic in float32.
Bytes moved: 3 · T · I · itemsize.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.formulas import gelu
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Return geglu in torch, a new tensor [T, I]."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((size, size), -1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)


@jit
def geglu_kernel(gate_up, y, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write y [T, SIZE]; BLOCK columns of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0)
    tl.store(y + row * SIZE + column, gelu(gate.to(tl.float32)).to(gate.dtype) * up, mask=inside)


def config(size: int) -> dict[str, Any]:
    """Return the compile-time arguments for `size` columns."""
    return {"SIZE": size, "BLOCK": 1024, "num_warps": 4}


def launch(gate_up: torch.Tensor) -> torch.Tensor:
    """Return geglu of gate_up [T, 2·I], a new tensor [T, I]."""
    if not launches(gate_up):
        return reference(gate_up)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    meta = config(size)
    if num_tokens:
        geglu_kernel[(num_tokens, cdiv(size, meta["BLOCK"]))](gate_up, y, gate_up.stride(0), **meta)
    return y
