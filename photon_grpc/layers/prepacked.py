"""A weight reordered once into the form that this CPU multiplies fastest, so that no call reorders it again.

| dtype, CPU                                   | kept as                         | multiplied by      |
|----------------------------------------------|---------------------------------|--------------------|
| float32 up to MAX_COLUMN_WEIGHTS, AVX2       | columns                         | torch (MKL)        |
| float32 up to MAX_COLUMN_WEIGHTS, AVX-512    | columns for few rows, and tiles | torch, oneDNN      |
| float32 above                                | tiles                           | oneDNN             |
| 16 bits where oneDNN multiplies them         | tiles                           | oneDNN             |
| 16 bits where it does not (AVX2)             | tiles of float16                | FBGEMM, in float32 |

Microseconds of one thread. The embedded model's 33 products, whose weights live in the last-level cache, 1 / 2 / 16 /
64 rows, AVX2: columns 726 / 1,253 / 4,451 / 17,400, oneDNN 1,308 / 3,227 / 5,888 / 21,100; one row with AVX-512: 530
and 920; on cores that others shared 1 / 2 / 4 / 8 rows: columns 1,059 / 1,136 / 1,185 / 1,255, oneDNN 1,860 / 2,015 /
1,863 / 3,284. A weight 16,384 × 2,048 in bfloat16, 1 / 16 / 64 rows, AVX2: FBGEMM 2,440 / 14,900 / 65,400, torch's own
3,800 / 61,900 / 285,000. Of Llama-3.2-1B's products with AVX-512, oneDNN against torch's own: in bfloat16 2.3 to 2.6
times as fast for one row, 1.5 for 16, 1.05 for 512; in float32 1.3 to 1.8 for one row, 2.2 to 4.8 above.

float16 holds every bfloat16 from 2⁻¹⁴ to 65,504 exactly, smaller ones to within 2⁻²⁵; a weight with larger ones is not
packed.
"""

from __future__ import annotations

from typing import Protocol

import torch

#: Elements of a float32 weight that is small: it stays in a cache between two steps. Rows up to which its columns are
#: faster than tiles with AVX-512.
MAX_COLUMN_WEIGHTS, MAX_COLUMN_ROWS = 1 << 21, 8
_LARGEST_HALF = 65504.0


class Packed(Protocol):
    """A function x Wᵀ + b for a W [out, in] that cannot be read back."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [T, in] -> [T, out] in x's dtype."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product in float32, not rounded first if the sums are float32."""


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed | None:
    """Return the weight packed; None if this build or this CPU multiplies no faster with any other form of it."""
    if weight.device.type != "cpu":
        return None
    is_small = weight.dtype == torch.float32 and weight.numel() <= MAX_COLUMN_WEIGHTS
    if is_small and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return ColumnWeight(weight, bias)
    if multiplies_tiles(weight.dtype):
        return SmallTiledWeight(weight, bias) if is_small else TiledWeight(weight, bias)
    return HalfWeight(weight, bias) if _fits_half(weight) and multiplies_half() else None


def multiplies_tiles(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies this dtype on this CPU without converting it."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(ops, "_linear_pointwise") or not hasattr(ops, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(ops._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def multiplies_half() -> bool:
    """Return whether torch has FBGEMM's product of float32 and packed float16, and this CPU its instructions."""
    has_instructions = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return has_instructions and torch.backends.quantized.engine in ("x86", "fbgemm")


def _fits_half(weight: torch.Tensor) -> bool:
    if weight.dtype not in (torch.bfloat16, torch.float16) or not weight.numel():
        return False
    least, largest = weight.aminmax()
    return float(least) >= -_LARGEST_HALF and float(largest) <= _LARGEST_HALF


class TiledWeight:
    """A weight in oneDNN's tiles."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._tiles = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self._tiles, self._bias, "none", [], "")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).float()


class ColumnWeight:
    """A weight as its transpose [in, out]; float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._columns = weight.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._columns) if self._bias is None else torch.addmm(self._bias, x, self._columns)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class SmallTiledWeight:
    """A weight in columns for few rows and in tiles for more; float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._columns = ColumnWeight(weight, bias)
        self._tiles = TiledWeight(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._columns(x) if x.shape[0] <= MAX_COLUMN_ROWS else self._tiles(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class HalfWeight:
    """A weight in FBGEMM's tiles of float16; products and sums are float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        quantized = torch.ops.quantized
        self._tiles = quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        self._multiply = quantized.linear_dynamic_fp16.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x).to(x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x.float(), self._tiles)
