"""Quantizing of float weights, by round-to-nearest.

s = max |W| over the scale's block / L,  in the dtype of scales, 1 if that is 0         L = 127, 7 in 4 bits, 448
q = round(W / s)                         to the nearest integer, ties to even; to the nearest e4m3
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from photon_grpc.config.quantization import WeightFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels.linear.decode import packed
from photon_grpc.layers.quantization.stored import Codes

#: The largest |q|.
LIMITS = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
#: Rows are quantized so many numbers at a time: the copies of a part are in float32.
_PART = 1 << 22
#: Parts are whole blocks of this many rows.
_ROWS = 128


def quantized(
    outputs: Iterable[tuple[str, slice]], weight: torch.Tensor, form: WeightFormat, dtype: torch.dtype
) -> Codes:
    """Return W [N, K] quantized, with scales in `dtype`; `outputs` name its rows in a ModelLoadError."""
    (rows, columns), (block_rows, block_columns) = weight.shape, form.block
    group = block_columns or columns
    values = torch.empty(rows, columns * form.bits // 8, dtype=_DTYPES[form.kind], device=weight.device)
    scales = torch.empty(-(-columns // group), -(-rows // block_rows), dtype=dtype, device=weight.device)
    size = max(1, _PART // (columns * _ROWS)) * _ROWS
    for name, of in outputs:
        for begin in range(of.start, of.stop, size):
            part = slice(begin, min(begin + size, of.stop))
            blocks = slice(begin // block_rows, -(-part.stop // block_rows))
            values[part], scales[:, blocks] = _part(name, weight[part].float(), form, dtype)
    return Codes(values, scales)


def _part(name: str, weight: torch.Tensor, form: WeightFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the scales [blocks of columns, blocks of rows] of some rows of W, float32."""
    limit, group = LIMITS[form.kind], form.block[1] or weight.shape[1]
    largest = torch.stack([part.abs().amax(1) for part in weight.split(group, 1)])
    if form.block[0] > 1:
        largest = torch.stack([part.amax(1) for part in largest.split(form.block[0], 1)], 1)
    if not bool(largest.isfinite().all()):
        raise ModelLoadError(f"{name}.weight: holds NaN or infinite numbers, which cannot be quantized", field=name)
    scales = (largest / limit).to(dtype)
    scales[scales == 0] = 1.0
    of_rows = scales.float().repeat_interleave(form.block[0], 1)[:, : weight.shape[0]]
    divisors = of_rows.t().repeat_interleave(group, 1)[:, : weight.shape[1]]
    return _rounded(weight / divisors, form), scales


def _rounded(weight: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    limit = LIMITS[form.kind]
    weight = weight.clamp_(-limit, limit)
    if form.kind == "fp8":
        return weight.to(torch.float8_e4m3fn)
    codes = weight.round_()
    return codes.to(torch.int8) if form.kind == "int8" else packed((codes + 8).to(torch.uint8))
