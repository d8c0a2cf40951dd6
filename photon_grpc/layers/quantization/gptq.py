"""Rounding to 4 bits that leaves the least error in products: GPTQ (Frantar et al., 2022).

Columns of W are rounded from the first to the last. What one loses, the columns behind it make up for, as far as inputs
of products go together: H = Xᵀ X of inputs X, damped, and with H⁻¹ = Uᵀ U

    e = (w_k - q_k) / U_kk,  w_j <- w_j - e U_kj,  j > k

Scales of a group are those of `rounding.least_error` for what is left of its columns when they are reached, each error
weighted by H_kk. W [N, K] and H [K, K] in float32, on any device.
"""

from __future__ import annotations

import torch

from photon_grpc.kernels.linear.decode import packed
from photon_grpc.layers.quantization.rounding import LIMITS, least_error
from photon_grpc.layers.quantization.stored import Codes

#: The part of the mean of H's diagonal that is added to it.
DAMPING = 0.01


def rounded(weight: torch.Tensor, moments: torch.Tensor, group: int, dtype: torch.dtype) -> Codes:
    """Return W in 4 bits, scales of `group` columns in `dtype`; `moments`: the sum of xᵀ x over inputs x."""
    damped = _damped(moments)
    left, root, importance = weight.clone(), inverse_root(damped), damped.diagonal()
    codes, scales = [], []
    for first in range(0, weight.shape[1], group):
        columns = slice(first, first + group)
        scale = _scales(left[:, columns], importance[columns], dtype)
        found, errors = _rounded_group(left[:, columns], root[columns, columns], scale.float())
        left[:, columns.stop :] -= errors @ root[columns, columns.stop :]
        codes.append(found)
        scales.append(scale)
    return Codes(packed((torch.cat(codes, 1) + 8).to(torch.uint8)), torch.stack(scales))


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


def _scales(columns: torch.Tensor, importance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = columns.abs().amax(1, keepdim=True)
    return least_error(columns[:, None], largest, dtype, importance)[:, 0]


def _rounded_group(columns: torch.Tensor, root: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of a group's columns, and the errors e of each."""
    left, codes, errors = columns.clone(), torch.empty_like(columns), torch.empty_like(columns)
    for k in range(columns.shape[1]):
        code = (left[:, k] / scale).round_().clamp_(*LIMITS["int4"])
        error = (left[:, k] - code * scale) / root[k, k]
        left[:, k:] -= error[:, None] * root[k, k:]
        codes[:, k], errors[:, k] = code, error
    return codes, errors
