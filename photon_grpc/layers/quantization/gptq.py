"""Rounding that leaves the least error in products: GPTQ (Frantar et al., 2022).

Columns of W are rounded from the first to the last. What one loses, the columns behind it make up for, as far as inputs
of products go together: H = Xᵀ X of inputs X, damped, and with H⁻¹ = Uᵀ U

    e = (w_k - q_k) / U_kk,  w_j <- w_j - e U_kj,  j > k

Scales are of what is left of a group's columns when they are reached: in 4 bits those of `rounding.least_error`, each
error weighted by H_kk, in e4m3 those of the largest number of a block. W [N, K] and H [K, K] in float32, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from photon_grpc.kernels.linear.decode import packed
from photon_grpc.layers.quantization.rounding import LIMITS, least_error
from photon_grpc.layers.quantization.stored import Codes

#: The part of the mean of H's diagonal that is added to it.
DAMPING = 0.01
#: Rows and columns that share a scale of e4m3.
BLOCK = 128


def rounded(weight: torch.Tensor, moments: torch.Tensor, group: int, dtype: torch.dtype) -> Codes:
    """Return W in 4 bits, scales of `group` columns in `dtype`; `moments`: the sum of xᵀ x over inputs x."""

    def scales_of(columns: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        return least_error(columns[:, None], columns.abs().amax(1, keepdim=True), dtype, importance)[:, 0]

    codes, scales = _by_groups(weight, moments, group, Grid(scales_of, _in_4_bits))
    return Codes(packed((codes + 8).to(torch.uint8)), scales)


def rounded_blocks(weight: torch.Tensor, moments: torch.Tensor) -> Codes:
    """Return W in e4m3 with a scale of every 128 x 128 numbers, float32; N and K are multiples of 128."""

    def scales_of(columns: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        scales = columns.abs().view(-1, BLOCK, BLOCK).amax((1, 2)) / LIMITS["fp8"][1]
        return torch.where(scales > 0, scales, 1.0).repeat_interleave(BLOCK)

    codes, scales = _by_groups(weight, moments, BLOCK, Grid(scales_of, _in_e4m3))
    return Codes(codes.to(torch.float8_e4m3fn), scales[:, ::BLOCK].contiguous())


class Grid(NamedTuple):
    """The numbers that a group's columns can have: their scales [N], for what is left and its importance, and codes."""

    scales_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    code_of: Callable[[torch.Tensor], torch.Tensor]


def _in_4_bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.round().clamp_(*LIMITS["int4"])


def _in_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(*LIMITS["fp8"]).to(torch.float8_e4m3fn).float()


def _by_groups(
    weight: torch.Tensor, moments: torch.Tensor, group: int, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of W in float32, and the scales [K / group, N]."""
    damped = _damped(moments)
    left, root, importance = weight.clone(), inverse_root(damped), damped.diagonal()
    codes, scales = [], []
    for first in range(0, weight.shape[1], group):
        columns = slice(first, first + group)
        scale = grid.scales_of(left[:, columns], importance[columns])
        found, errors = _rounded_group(left[:, columns], root[columns, columns], scale.float(), grid)
        left[:, columns.stop :] -= errors @ root[columns, columns.stop :]
        codes.append(found)
        scales.append(scale)
    return torch.cat(codes, 1), torch.stack(scales)


def _damped(moments: torch.Tensor) -> torch.Tensor:
    """Return H in float64, positive definite: inputs that were always 0 count a little."""
    exact = moments.double()
    least = (DAMPING * exact.diagonal().mean()).clamp_min(2.0**-40)
    return exact + torch.diag(least.expand(len(exact)))


def inverse_root(damped: torch.Tensor) -> torch.Tensor:
    """Return U, upper triangular, with Uᵀ U = H⁻¹."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    root: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return root.float()


def _rounded_group(
    columns: torch.Tensor, root: torch.Tensor, scale: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of a group's columns, and the errors e of each."""
    left, codes, errors = columns.clone(), torch.empty_like(columns), torch.empty_like(columns)
    for k in range(columns.shape[1]):
        code = grid.code_of(left[:, k] / scale)
        error = (left[:, k] - code * scale) / root[k, k]
        left[:, k:] -= error[:, None] * root[k, k:]
        codes[:, k], errors[:, k] = code, error
    return codes, errors
