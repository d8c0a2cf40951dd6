"""SwiGLU and GeGLU for gate and up side by side in one tensor.

    swiglu:       y = round(act(gate)) · up, rounded as transformers does
    norm_swiglu:  y = act(g) · u,  (g, u) = r · gate_up + b,  r = 1 / sqrt(mean(h²) + eps), rounded once

act is silu(a) = a / (1 + exp(-a)), or the tanh form of gelu, gelu(a) = a / 2 · (1 + tanh(z)) = a / (1 + exp(-2z)),
z = sqrt(2 / π) · (a + 0.044715 · a³).

The second follows a projection of the residual stream h that is not normalised. The norm, whose weight is folded into
the projection, is applied here (as `rotate_store.py` does for attention).

Shapes: gate_up [T, 2·I] (gate first; rows may be strided), h [T, H], b [2·I] or None -> y [T, I]. bf16, fp16, fp32;
arithmetic in float32. Bytes moved: 3 · T · I · itemsize (+ T · H · itemsize).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import gated, gelu
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.lang.squares import row_scale

#: What the gate goes through.
Activation = Literal["silu", "gelu"]


class Gated(NamedTuple):
    """Columns of the gate, and of up, and what the gate goes through."""

    SIZE: int
    ACTIVATION: Activation


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    functional = torch.nn.functional
    return functional.gelu(gate, approximate="tanh") if activation == "gelu" else functional.silu(gate)


def reference(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Return swiglu in torch, a new tensor [T, I]."""
    size = gate_up.shape[-1] // 2
    gate, up = gate_up.split_with_sizes((size, size), -1)
    return activated(gate, activation).mul_(up)


def norm_reference(
    gate_up: torch.Tensor, h: torch.Tensor, b: torch.Tensor | None, eps: float, y: torch.Tensor,
    activation: Activation = "silu",
) -> None:  # fmt: skip
    """Fill y with norm_swiglu in torch."""
    scaled = gate_up.float() * torch.rsqrt(squares.total_reference(h) / h.shape[1] + eps)[:, None]
    gate, up = (scaled if b is None else scaled + b.float()).chunk(2, dim=-1)
    y.copy_(activated(gate, activation) * up)


@jit
def swiglu_kernel(gate_up, y, stride, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Write y [T, SIZE]; BLOCK columns of one row per program."""
    SIZE: tl.constexpr = GATED.SIZE
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=inside, other=0.0)
    a = gate.to(tl.float32)
    if GATED.ACTIVATION == "gelu":
        a = gelu(a)
    else:
        a = a / (1.0 + tl.exp(-a))
    tl.store(y + row * SIZE + column, a.to(gate.dtype) * up, mask=inside)


@jit
def norm_swiglu_kernel(
    gate_up, h, bias, y, stride, eps,
    GATED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, HIDDEN: tl.constexpr, LEVELS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write y [T, SIZE]; COLUMNS columns of one row per program, BLOCK at a time."""
    SIZE: tl.constexpr = GATED.SIZE
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * COLUMNS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = begin + tl.arange(0, BLOCK)
    # Loaded before the sum over h, since the compiler moves nothing across its barrier.
    gate = tl.load(gate_up + row * stride + column, mask=column < SIZE, other=0.0)
    up = tl.load(gate_up + row * stride + SIZE + column, mask=column < SIZE, other=0.0)
    scale = row_scale(row, h, None, eps, HIDDEN, LEVELS)
    store_product((gate, up), bias, y + row * SIZE, column, scale, GATED)
    for start in range(BLOCK, COLUMNS, BLOCK):
        column = begin + start + tl.arange(0, BLOCK)
        gate = tl.load(gate_up + row * stride + column, mask=column < SIZE, other=0.0)
        up = tl.load(gate_up + row * stride + SIZE + column, mask=column < SIZE, other=0.0)
        store_product((gate, up), bias, y + row * SIZE, column, scale, GATED)


@jit
def store_product(gate_up, bias, y, column, scale, GATED: tl.constexpr):
    """Store act(scale · gate + b) · (scale · up + b) to these columns of a row."""
    SIZE: tl.constexpr = GATED.SIZE
    ACTIVATION: tl.constexpr = GATED.ACTIVATION
    inside = column < SIZE
    gate, up = gate_up
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if bias is not None:
        gate = tl.fma(gate, scale, tl.load(bias + column, mask=inside, other=0.0).to(tl.float32))
        up = tl.fma(up, scale, tl.load(bias + SIZE + column, mask=inside, other=0.0).to(tl.float32))
    else:
        gate, up = gate * scale, up * scale
    tl.store(y + column, gated(gate, up, ACTIVATION).to(y.dtype.element_ty), mask=inside)


def config(size: int, activation: Activation = "silu") -> dict[str, Any]:
    """Return the compile-time arguments for `size` columns."""
    return {"GATED": Gated(size, activation), "BLOCK": 1024, "num_warps": 4}


def launch(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Return swiglu of gate_up [T, 2·I], a new tensor [T, I]."""
    if not launches(gate_up):
        return reference(gate_up, activation)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    meta = config(size, activation)
    if num_tokens:
        swiglu_kernel[(num_tokens, cdiv(size, meta["BLOCK"]))](gate_up, y, gate_up.stride(0), **meta)
    return y


#: From this many rows on one program takes a whole row: the device is full, and the row of h is read once.
WHOLE_ROWS = 1024


def norm_config(num_tokens: int, size: int, hidden: int, activation: Activation = "silu") -> dict[str, Any]:
    """Return the compile-time arguments of `norm_swiglu`, all but PDL."""
    block = 2048
    columns = cdiv(size, block) * block if num_tokens >= WHOLE_ROWS else block
    shape = {"GATED": Gated(size, activation), "HIDDEN": hidden, "LEVELS": squares.levels(hidden)}
    return shape | {"COLUMNS": columns, "BLOCK": block, "num_warps": 8}


def norm_launch(
    gate_up: torch.Tensor, h: torch.Tensor, b: torch.Tensor | None, eps: float, y: torch.Tensor,
    activation: Activation = "silu",
) -> None:  # fmt: skip
    """Fill y [T, I], contiguous as h, with norm_swiglu of gate_up [T, 2·I] and h [T, H]."""
    if not launches(gate_up):
        return norm_reference(gate_up, h, b, eps, y, activation)
    num_tokens, size = y.shape
    meta = norm_config(num_tokens, size, h.shape[1], activation)
    if num_tokens:
        grid = (num_tokens, cdiv(size, meta["COLUMNS"]))
        norm_swiglu_kernel[grid](gate_up, h, b, y, gate_up.stride(0), eps, **meta, **dependent_launch(h.device))
    return None
