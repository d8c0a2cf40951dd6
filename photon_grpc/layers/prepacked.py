"""A weight reordered once into the tiles that oneDNN multiplies with, so that no call reorders it again.

Against torch's own matmul on one Zen 5 core, Llama-3.2-1B shapes: in bfloat16 2.3 to 2.6 times as fast for one row, 1.5 for
16, 1.05 for 512; in float32 1.3 to 1.8 times for one row, 2.2 to 4.8 above. A GEMV of the row-major weight only looks faster
for one float32 row of a small layer: once the weights of a whole step no longer fit a second-level cache, it loses too.
"""

from __future__ import annotations

import torch


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether this build and this CPU multiply with packed weights of this kind."""
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(ops, "_linear_pointwise") or not hasattr(ops, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


class Prepacked:
    """x Wᵀ + b for a packed W [out, in]; opaque, so nothing else can be read from it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return self._multiply(x, self.packed, self.bias, "none", [], "")
