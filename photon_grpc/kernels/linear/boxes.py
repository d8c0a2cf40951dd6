"""Copies by the bulk copy engine of sm_90: boxes of a tensor, and their layout in shared memory."""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.gluon import TensorDescriptor, constexpr_function, gl


@constexpr_function
def box_layout(rank: int, bits: int, swizzle: int) -> Any:
    """Return the layout of what is copied in shared memory: `swizzle` bytes are a row, or 0."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def descriptor(tensor: torch.Tensor, box: list[int], swizzle: int) -> Any:
    """Return the engine's view of a tensor in such boxes."""
    layout = box_layout(len(box), 8 * tensor.element_size(), swizzle)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)


def rows_descriptor(values: torch.Tensor, box: tuple[int, int], span: int, swizzle: int) -> Any:
    """Return the engine's view of W [N, columns] in boxes of so many rows and columns.

    With a span a box has the two halves of its pairs, by groups of eight.
    """
    rows, columns = box
    if not span:
        return descriptor(values, [rows, columns], swizzle)
    n, size = values.shape
    pairs = values.view(n // (2 * span), 2, span // 8, 8, size).transpose(1, 2)
    return descriptor(pairs, [1, rows // 16, 2, 8, columns], swizzle)
