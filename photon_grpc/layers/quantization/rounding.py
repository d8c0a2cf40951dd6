"""Quantization of float weights by round-to-nearest.

s = max |W| over the scale's block / L,  in the dtype of scales, 1 if that is 0         L = 127, 448 of e4m3
q = round(W / s)                         to the nearest integer, ties to even; to the nearest e4m3

In 4 bits, where q is from -8 to 7, the largest numbers are better cut off: of a few scales that end at a share of
max |W| each is replaced by the one that suits its q best, Σ W q / Σ q², and the one with the least squared error is
taken (the search for a clipping range of OMSE, Choukroun et al., 2019, by group). The scale has the sign that gives
the group's largest number the code on the longer side, -8: it is negative where that number is positive. Kernels
multiply by a negative scale as by another; decision 80 has what this gains.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from photon_grpc.config.quantization import WeightFormat
from photon_grpc.errors import ModelLoadError
from photon_grpc.kernels.linear.decode import packed
from photon_grpc.layers.quantization.stored import Codes

#: The least and the largest q.
LIMITS = {"int8": (-127.0, 127.0), "int4": (-8.0, 7.0), "fp8": (-448.0, 448.0)}
#: Shares of max |W| at which scales of 4 bits end, and the number of q between that and 0.
SHARES, HALF_RANGE = (0.7, 0.78, 0.86, 0.93, 1.0), 7.5
_DTYPES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
#: Rows are quantized so many numbers at a time, by the type of the device: copies of a part are in float32 and float64.
#: On a CPU they stay in its caches; a GPU needs few launches.
_PARTS = {"cpu": 1 << 18, "cuda": 1 << 22}


def quantized(
    outputs: Iterable[tuple[str, slice]], weight: torch.Tensor, form: WeightFormat, dtype: torch.dtype
) -> Codes:
    """Return W [N, K] quantized, with scales in `dtype`; `outputs` name its rows in a ModelLoadError."""
    (rows, columns), (block_rows, block_columns) = weight.shape, form.block
    group = block_columns or columns
    values = torch.empty(rows, columns * form.bits // 8, dtype=_DTYPES[form.kind], device=weight.device)
    scales = torch.empty(-(-columns // group), -(-rows // block_rows), dtype=dtype, device=weight.device)
    size = max(1, _PARTS[weight.device.type] // (columns * block_rows)) * block_rows
    for name, of in outputs:
        for begin in range(of.start, of.stop, size):
            part = slice(begin, min(begin + size, of.stop))
            blocks = slice(begin // block_rows, -(-part.stop // block_rows))
            values[part], scales[:, blocks] = _part(name, weight[part].float(), form, dtype)
    return Codes(values, scales)


def _part(name: str, weight: torch.Tensor, form: WeightFormat, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the scales [blocks of columns, blocks of rows] of some rows of W, float32."""
    group = form.block[1] or weight.shape[1]
    largest = torch.stack([part.abs().amax(1) for part in weight.split(group, 1)])
    if form.block[0] > 1:
        largest = torch.stack([part.amax(1) for part in largest.split(form.block[0], 1)], 1)
    if not bool(largest.isfinite().all()):
        raise ModelLoadError(f"{name}.weight: holds NaN or infinite numbers, which cannot be quantized", field=name)
    if form.kind == "int4":
        groups = weight.unflatten(1, (-1, group))
        is_positive = groups.amax(2) == largest.t()
        scales = least_error(groups, torch.where(is_positive, -largest.t(), largest.t()), dtype).t()
    else:
        scales = (largest / LIMITS[form.kind][1]).to(dtype)
        scales[scales == 0] = 1.0
    of_rows = scales.float().repeat_interleave(form.block[0], 1)[:, : weight.shape[0]]
    divisors = of_rows.t().repeat_interleave(group, 1)[:, : weight.shape[1]]
    return _rounded(weight / divisors, form), scales


def least_error(
    groups: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return the scales [rows, groups] of W [rows, groups, columns] in 4 bits, in `dtype`.

    largest: max |W| of each group, with the sign of its scale. importance: of each column's squared error, float64.
    """
    best, least = torch.ones_like(largest).to(dtype), torch.full_like(largest, torch.inf, dtype=torch.float64)
    # In float64 the order of a sum does not show in the scale.
    exact = groups.double() * importance
    # Memory of results is used again: on a CPU new memory takes longer than the computation.
    codes, products = torch.empty_like(groups), torch.empty_like(exact)

    def sums(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Σ W q and Σ q² of the codes q for these scales."""
        torch.div(groups, scales[..., None], out=codes).round_().clamp_(*LIMITS["int4"])
        weighted = torch.mul(exact, codes, out=products).sum(-1)
        return weighted, torch.mul(codes.square_(), importance, out=products).sum(-1)

    for share in SHARES:
        weighted, squares = sums(largest * (share / HALF_RANGE))
        scales = (weighted / squares).float().to(dtype)
        weighted, squares = sums(scales.float())
        # Σ (q s - W)², less Σ W². Those of zeros are no number, and stay 1.
        error = scales.double() * (scales.double() * squares - 2 * weighted)
        is_less = error < least
        best, least = torch.where(is_less, scales, best), torch.where(is_less, error, least)
    return best


def _rounded(weight: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    weight = weight.clamp_(*LIMITS[form.kind])
    if form.kind == "fp8":
        return weight.to(torch.float8_e4m3fn)
    codes = weight.round_()
    return codes.to(torch.int8) if form.kind == "int8" else packed((codes + 8).to(torch.uint8))
