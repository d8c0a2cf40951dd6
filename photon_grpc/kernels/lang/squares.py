"""The sum of squares of a row, in one order: what every RMSNorm of a chain of fused kernels divides by.

    partial[t, g] = Σ h[t, 16 g … 16 g + 15]²,  total[t] = Σ partial[t]

Both sums are trees over neighbours: (0 + 1) + (2 + 3) …; rows are padded with zeros to a power of two. A sum of two
numbers is the same in either order, so the tree does not depend on how threads share the row. Kernels that write h
leave the partials; behind those that do not, `launch` makes them.

Shapes: h [M, H] contiguous, H a multiple of 16 -> partial float32 [M, H / 16]. bf16, fp16, fp32.
Bytes moved: M · H · itemsize.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.formulas import tree_sum
from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    dependent_launch,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
)
from photon_grpc.kernels.lang.jit import jit, launches, next_power_of_2, tl

#: Columns of a partial sum.
GROUP = 16


def reference(h: torch.Tensor) -> torch.Tensor:
    """Return partial in torch: a new tensor."""
    return _tree(h.float().square().view(h.shape[0], -1, GROUP))


def total_reference(h: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of h [M, H] in torch: float32 [M]."""
    partial = reference(h)
    return _tree(torch.nn.functional.pad(partial, (0, next_power_of_2(partial.shape[1]) - partial.shape[1])))


def _tree(numbers: torch.Tensor) -> torch.Tensor:
    while numbers.shape[-1] > 1:
        numbers = numbers[..., ::2] + numbers[..., 1::2]
    return numbers.squeeze(-1)


@jit
def group_sums(squares):
    """Return the sums of groups [N / 16] of squares [N]."""
    return tree_sum(tl.reshape(squares, [squares.shape[0] // 16, 16]))


@jit
def row_scale(row, h, partial, eps, HIDDEN: tl.constexpr, LEVELS: tl.constexpr):
    """Return 1 / sqrt(mean(h[row]²) + eps), from `partial` if that is given; 2 ** LEVELS >= HIDDEN / 16."""
    if partial is not None:
        group = tl.arange(0, 2**LEVELS)
        sums = tl.load(partial + row * (HIDDEN // 16) + group, mask=group < HIDDEN // 16, other=0.0)
    else:
        element = tl.arange(0, 16 * 2**LEVELS)
        x = tl.load(h + row * HIDDEN + element, mask=element < HIDDEN, other=0.0).to(tl.float32)
        sums = group_sums(x * x)
    return tl.rsqrt(tl.sum(tree_sum(tl.reshape(sums, [1, sums.shape[0]])), 0) / HIDDEN + eps)


@constexpr_function
def padded_groups(hidden: int) -> int:
    """Return the groups of a row of `hidden` columns, padded to a power of two."""
    return 1 << (hidden // 16 - 1).bit_length()


@gluon_jit
def load_partials(partial, HIDDEN: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Load [ROWS, padded_groups(HIDDEN)] of the first rows of partial [>= ROWS, HIDDEN / 16], padded with zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    group = gl.arange(0, padded_groups(HIDDEN), layout=gl.SliceLayout(0, layout))[None, :]
    there = (group < HIDDEN // 16) & (token >= 0)
    return gl.load(partial + token * (HIDDEN // 16) + group, mask=there, other=0.0)


@gluon_jit
def totals(sums):
    """Return the sums [ROWS] of [ROWS, N], N a power of two."""
    ROWS: gl.constexpr = sums.shape[0]
    LEVELS: gl.constexpr = sums.shape[1].bit_length() - 1
    for _ in gl.static_range(LEVELS):
        sums = gl.sum(sums.reshape([ROWS, sums.shape[1] // 2, 2]), 2)
    return sums.reshape([ROWS])


@gluon_jit
def totals_at_once(partial, HIDDEN: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return the sums [ROWS] of partial, with few numbers in registers at a time."""
    PAD: gl.constexpr = padded_groups(HIDDEN)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    group = gl.arange(0, 32 if PAD > 32 else PAD, layout=gl.SliceLayout(0, layout))
    return _totals_from(partial, token, group, 0, PAD, HIDDEN // 16)


@gluon_jit
def _totals_from(partial, token, group, FIRST: gl.constexpr, SIZE: gl.constexpr, GROUPS: gl.constexpr):
    """Return the sums of SIZE groups from FIRST on: a tree whose leaves are loaded one after the other."""
    if group.shape[0] < SIZE:
        sums = _totals_from(partial, token, group, FIRST, SIZE // 2, GROUPS)
        if FIRST + SIZE // 2 < GROUPS:
            sums += _totals_from(partial, token, group, FIRST + SIZE // 2, SIZE // 2, GROUPS)
    else:
        there = (FIRST + group < GROUPS)[None, :] & (token >= 0)[:, None]
        leaf = gl.load(partial + token[:, None] * GROUPS + (FIRST + group)[None, :], mask=there, other=0.0)
        sums = gl.convert_layout(totals(leaf), token.type.layout)
    return sums


@gluon_jit
def tile_groups(tile):
    """Return the sums of groups [N / 16, M] of squares [N, M]."""
    M: gl.constexpr = tile.shape[1]
    sums = tile.reshape([tile.shape[0] // 16, 16, M])
    for _ in gl.static_range(4):
        sums = gl.sum(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2, M]), 2)
    return sums.reshape([sums.shape[0], M])


@jit
def squares_kernel(h, partial, HIDDEN: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr):
    """Write the partials of one row per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PAD)
    x = tl.load(h + row * HIDDEN + element, mask=element < HIDDEN, other=0.0).to(tl.float32)
    group = tl.arange(0, PAD // 16)
    tl.store(partial + row * (HIDDEN // 16) + group, group_sums(x * x), mask=group < HIDDEN // 16)


@jit
def norms_kernel(h, norms, eps, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr):
    """Write the factor of one row per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tl.store(norms + row, row_scale(row, h, None, eps, HIDDEN, LEVELS))


def norms_config(hidden: int) -> dict[str, Any]:
    """Return the compile-time arguments of `norms`, all but PDL."""
    return {"HIDDEN": hidden, "LEVELS": levels(hidden), "num_warps": config(hidden)["num_warps"]}


def norms(h: torch.Tensor, eps: float) -> torch.Tensor:
    """Return 1 / sqrt(mean(h²) + eps) of every row of h: float32 [M]."""
    if not launches(h):
        return torch.rsqrt(total_reference(h) / h.shape[1] + eps)
    found = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    if h.shape[0]:
        norms_kernel[(h.shape[0],)](h, found, eps, **norms_config(h.shape[1]), **dependent_launch(h.device))
    return found


def levels(hidden: int) -> int:
    """Return LEVELS of rows of `hidden` columns."""
    return next_power_of_2(hidden // GROUP).bit_length() - 1


def config(hidden: int) -> dict[str, Any]:
    """Return the compile-time arguments for rows of `hidden` columns, all but PDL."""
    pad = GROUP * next_power_of_2(hidden // GROUP)
    return {"HIDDEN": hidden, "PAD": pad, "num_warps": max(1, min(8, pad // 512))}


def launch(h: torch.Tensor, partial: torch.Tensor) -> None:
    """Fill partial."""
    if not launches(h):
        partial.copy_(reference(h))
    elif h.shape[0]:
        squares_kernel[(h.shape[0],)](h, partial, **config(h.shape[1]), **dependent_launch(h.device))
