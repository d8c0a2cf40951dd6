"""Products with a W stored in 8 bits whose input is quantized too, each with its epilogue, as in `gemm.py`.

`tiled_…` is a kernel of ours that does all of it behind the one that quantizes; `apart_…` is the product at any number
of rows, and on any device, and a second kernel. Both give the same bits. `linear.weight` is a `products8.Weight`.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.linear import fused8, products8
from photon_grpc.kernels.linear.fused8 import Linear8
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.linear.tiles8 import Way
from photon_grpc.kernels.rotary.rotate_store import HeadOutput
from photon_grpc.layers.gemm import Epilogue, Gemm, Operands
from photon_grpc.layers.workspace import Workspace


def linear8(linear: Operands) -> Linear8:
    return Linear8(linear.weight, linear.bias)


def tiled_rotary(linear: Operands, way: Way, end: Epilogue, work: Workspace, pages: torch.Tensor, layer: int) -> None:
    """Fill work.q, and `layer` of pages [num_blocks, layers, 2, Hkv, block_size, D]."""
    out = HeadOutput(work.q, pages, layer, work.rotation, end.norms)
    fused8.qkv_launch(work.stream(), linear8(linear), end.eps, out, way, work.counters)


def apart_rotary(linear: Operands, end: Epilogue, work: Workspace, pages: torch.Tensor, layer: int) -> None:
    """Fill work.q and the pages as `tiled_rotary` does."""
    out = HeadOutput(work.q, pages, layer, work.rotation, end.norms)
    fused8.qkv_apart(work.h, linear8(linear), end.eps, out)


def tiled_swiglu(linear: Operands, way: Way, end: Epilogue, work: Workspace) -> None:
    """Fill work.y."""
    fused8.swiglu_launch(work.stream(), linear8(linear), end.eps, work.y, way, work.counters)


def apart_swiglu(linear: Operands, end: Epilogue, work: Workspace) -> None:
    """Fill work.y as `tiled_swiglu` does."""
    fused8.swiglu_apart(work.h, linear8(linear), end.eps, work.y)


def tiled_add(linear: Operands, way: Way, end: Epilogue, work: Workspace, x: torch.Tensor) -> None:
    """Change work.h."""
    fused8.add_launch(ResidualStream(work.h, work.written()), x, linear8(linear), way, work.counters)


def apart_add(linear: Operands, end: Epilogue, work: Workspace, x: torch.Tensor) -> None:
    """Change work.h as `tiled_add` does."""
    work.outdated()
    fused8.add_apart(work.h, x, linear8(linear))


def apply(linear: Operands, x: torch.Tensor) -> torch.Tensor:
    """Return W x + b [T, N]; b is added to what is rounded, as in the others."""
    y = products8.product(x, linear.weight)
    return y if linear.bias is None else y.add_(linear.bias)


TILED: dict[str, Gemm] = {"rotary": tiled_rotary, "add": tiled_add, "swiglu": tiled_swiglu}
APART: dict[str, Gemm] = {"rotary": apart_rotary, "add": apart_add, "swiglu": apart_swiglu}
