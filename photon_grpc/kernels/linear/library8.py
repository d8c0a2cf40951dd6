"""Products of 8-bit numbers by the matrix library, and a reference in torch.

    int8:  int32 [T, N], exact: the same in any order, as long as K < 2^17
    e4m3:  float32 [T, N]: sums of 128 columns, added forwards in float32
    scaled:  y = round((sums · s_w) · s_x)

The library's int8 product takes more than 16 rows of x and multiples of 8 rows and columns of W. Its e4m3 product takes
multiples of 16; without fast accumulation it adds each 128 columns to a float32, forwards, which are the bits of
`wgmma8.py`, with one scale and float32 sums, and with scales of rows and bf16 results: then it scales the sums in the
order above. Of all else the scales are applied afterwards by `rescale.py`. tests/gpu/kernels/test_products8_on_gpu.py
compares them.

The library is asked for `rows_at_once` rows after the other, which are independent: their sums, four bytes each, then
stay in the second-level cache until they are rescaled, or at least in bounded memory.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from photon_grpc.kernels.linear import rescale
from photon_grpc.kernels.linear.quantize import GROUP, QuantizedRows

#: Bytes of sums that stay in the second-level cache; rows of x that are multiplied at once where not even 1,024 fit.
_CACHED_BYTES, MAX_ROWS = 34 << 20, 4096
#: Products from which the library is faster with scales of rows than with one and a kernel behind it.
_SCALED_PRODUCTS = 1 << 36
#: Rows that the library's int8 product wants at least; columns whose int8 products a float32 sums exactly.
_LEAST_ROWS, _EXACT_COLUMNS = 32, 1024


def has_blocks(values: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether each 128 x 128 of W [N, K] has a scale, [K / 128, N / 128]; else each row, [1, N]."""
    return scales.shape[1] != values.shape[0]


def takes(values: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether the library multiplies by this weight [N, K] on its device with the same bits as our kernel."""
    if not values.is_cuda or has_blocks(values, scales):
        return False
    (n, k), is_int = values.shape, values.dtype == torch.int8
    least = (8, 0) if is_int else (8, 9)
    multiple = 8 if is_int else 16
    return torch.cuda.get_device_capability(values.device) >= least and n % multiple == 0 and k % multiple == 0


def rows_at_once(n: int) -> int:
    """Return the rows of x that the library multiplies by W [n, K] at a time."""
    return next((rows for rows in (2048, 1024) if 4 * rows * n <= _CACHED_BYTES), MAX_ROWS)


def sums(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x Wᵀ by the library: x [T, K] and W [N, K] both int8 or both e4m3; int32 or float32 [T, N]."""
    if x.dtype == torch.int8:
        missing = max(0, _LEAST_ROWS - x.shape[0])
        product: torch.Tensor = torch._int_mm(F.pad(x, (0, 0, 0, missing)) if missing else x, w.t())
        return product[: x.shape[0]]
    one = _one(x.device)
    return torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=False)


def scaled(
    rows: QuantizedRows, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:  # fmt: skip
    """Return the product [T, N] of rows and values, both with scales of rows, by the library."""
    is_large = len(rows.values) * values.numel() >= _SCALED_PRODUCTS
    if values.dtype != torch.int8 and dtype == torch.bfloat16 and is_large:
        return torch._scaled_mm(
            rows.values, values.t(), rows.scales[:, None], scales, out_dtype=dtype, use_fast_accum=False
        )
    y = torch.empty((rows.values.shape[0], values.shape[0]), dtype=dtype, device=values.device)
    at_once = rows_at_once(values.shape[0])
    for first in range(0, len(y), at_once):
        part = slice(first, first + at_once)
        rescale.launch(sums(rows.values[part], values), rows.scales[part], scales[0], y[part])
    return y


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device)


def int_reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the sums of int8 in torch: int32 [T, N]."""
    # Products of 1,024 columns are below 2^24: float32 holds their sums, and its products are fast on a CPU.
    parts = zip(x.split(_EXACT_COLUMNS, 1), w.split(_EXACT_COLUMNS, 1), strict=True)
    return functools.reduce(torch.add, ((part.float() @ weight.float().t()).int() for part, weight in parts))


def chunk_sums(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of each 128 columns of e4m3 in torch, rounded once: float32 [T, N] each."""
    # In float64 they are exact: the products of two e4m3 are multiples of 2^-18 below 2^18.
    parts = zip(x.split(GROUP, 1), w.split(GROUP, 1), strict=True)
    return [(part.double() @ weight.double().t()).float() for part, weight in parts]


def reference(rows: QuantizedRows, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the product with all scales in torch: float32 [T, N]."""
    if has_blocks(values, scales):
        return _blocks_reference(rows, values, scales)
    if values.dtype == torch.int8:
        total = int_reference(rows.values, values).float()
    else:
        total = functools.reduce(torch.add, chunk_sums(rows.values, values))
    return total * scales[0] * rows.scales[:, None]


def _blocks_reference(rows: QuantizedRows, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    of_w = scales.repeat_interleave(GROUP, 1)[:, : values.shape[0]]
    total = torch.zeros((rows.values.shape[0], values.shape[0]), device=values.device)
    for number, part in enumerate(chunk_sums(rows.values, values)):
        scale = rows.scales[:, number, None] * of_w[number]
        # One rounding, as a fused multiply and add has.
        total = (part.double() * scale.double() + total.double()).float()
    return total
