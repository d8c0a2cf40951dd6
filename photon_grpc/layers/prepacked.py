"""A weight reordered once into the tiles that oneDNN multiplies with, so that no call reorders it again.

Against torch's own matmul on one Zen 5 core, Llama-3.2-1B shapes: in bfloat16 2.3 to 2.6 times as fast for one row, 1.5
for 16, 1.05 for 512; in float32 1.3 to 1.8 times for one row, 2.2 to 4.8 above.

A small float32 weight is kept by columns as well, for single rows: all 33 products of the embedded model, whose
weights live in the last-level cache, take 0.53 ms that way and 0.92 ms packed. Large ones come from memory, where the
packed form is faster.
"""

from __future__ import annotations

import torch

#: Elements of a weight that is kept by columns too.
MAX_COLUMN_WEIGHTS = 1 << 21


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
        is_small = weight.dtype == torch.float32 and weight.numel() <= MAX_COLUMN_WEIGHTS
        self._columns = weight.t().contiguous().t() if is_small else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        if self._columns is None or x.shape[0] != 1:
            return self._multiply(x, self.packed, self.bias, "none", [], "")
        if self.bias is None:
            return torch.mv(self._columns, x[0])[None]
        return torch.addmv(self.bias, self._columns, x[0])[None]
