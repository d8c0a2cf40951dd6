"""Products of packed weights with more rows of x than `fused_linear.py` takes, by the kernel of `wgmma.py`.

    sums[s] = x[:, slice s] W[:, slice s]ᵀ

W is decoded in registers, once for each block of rows. For the matrix library a kernel must write all of W in 16 bits
first, which pays only with thousands of rows. Both give the same bits.

Shapes: x [T, K] contiguous, W as of an arranged QuantizedWeight -> sums [S, T, N]. bf16 and fp16.
Operations: 2 · T · N · K. Bytes moved: N · K · bits / 8, and those of the sums; from the second-level cache x, once for
BN rows of W.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import has_dependent_launch, has_wgmma
from photon_grpc.kernels.lang.jit import cdiv, num_multiprocessors
from photon_grpc.kernels.linear import epilogue
from photon_grpc.kernels.linear.fused_linear import Affine
from photon_grpc.kernels.linear.tiles import Problem, Tile, fits
from photon_grpc.kernels.linear.weight import QuantizedWeight, WeightKind
from photon_grpc.kernels.linear.wgmma import wgmma_kernel

#: Shared memory that a program's steps may take: nothing is exchanged between threads beside them.
MAX_BYTES = 210_000


class WideTile(NamedTuple):
    """A Tile, the rows of x that a program takes, and the microseconds of its 64 columns of K on an H200."""

    tile: Tile
    rows: int
    step_us: float


#: In the order of their operations for a byte read.
WIDE = (
    WideTile(Tile("wgmma", 128, 64, 8, 5), 256, 0.78),
    WideTile(Tile("wgmma", 128, 128, 8, 4), 128, 0.45),
    WideTile(Tile("wgmma", 64, 128, 4, 5), 128, 0.3),
)
#: The library on an H200: operations a microsecond; bytes a microsecond of the kernel that writes W for it.
LIBRARY_MATRIX, WRITTEN = 7.7e8, 3.8e6


def choose(x: torch.Tensor, linear: Affine) -> WideTile | None:
    """Return how to multiply; None if the matrix library is faster with a written W, or no tile can."""
    w = linear.w
    if not isinstance(w, QuantizedWeight) or not w.is_arranged or not x.shape[0] or not has_wgmma(x.device):
        return None
    return _choose(x.shape[0], *w.shape, linear.slices, w.kind, num_multiprocessors(x.device))


@cache
def _choose(rows: int, n: int, k: int, slices: int, kind: WeightKind, num_multiprocessors: int) -> WideTile | None:
    def us(wide: WideTile) -> float:
        """Return the microseconds of its waves of programs, one at a time on a multiprocessor."""
        programs = n // wide.tile.BN * slices * cdiv(rows, wide.rows)
        return cdiv(programs, num_multiprocessors) * k / slices / 64 * wide.step_us

    found = [wide for wide in WIDE if fits(wide.tile, problem(wide, n, k, slices, kind), MAX_BYTES)]
    best = min(found, key=us, default=None)
    written = n * k * (2 * rows / LIBRARY_MATRIX + (2 + kind.BITS / 8) / WRITTEN)
    return best if best is not None and us(best) < written else None


def problem(wide: WideTile, n: int, k: int, slices: int, kind: WeightKind) -> Problem:
    """Return what the kernel is compiled for."""
    return Problem(n, k, wide.rows, GUARD=True, SLICES=slices, WEIGHT=kind, IS_WIDE=True)


def launch(x: torch.Tensor, linear: Affine, wide: WideTile, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sums, float32 if there is no `dtype`."""
    (num_rows, k), n, slices = x.shape, linear.w.shape[0], linear.slices
    y = torch.empty((slices, num_rows, n), dtype=dtype or torch.float32, device=x.device)
    pdl = has_dependent_launch(x.device)
    options = {"num_warps": wide.tile.KW, "launch_pdl": True} if pdl else {"num_warps": wide.tile.KW}
    of_program = problem(wide, n, k, slices, linear.kind)
    constants = epilogue.load_nothing, epilogue.store_sums, of_program, wide.tile, pdl
    grid = n // wide.tile.BN, slices, cdiv(num_rows, wide.rows)
    wgmma_kernel[grid](linear.operand, None, x, y, num_rows, None, None, None, None, *constants, **options)
    return y
