"""Shared by `segments.py` and `segments8.py`: rows in the order of the work list, its tiles, and ends of tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.formulas import silu_product
from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    dependent_launch,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    mbarrier,
)
from photon_grpc.kernels.lang.jit import jit, next_power_of_2, tl
from photon_grpc.kernels.moe.route import Routing


class SegmentProblem(NamedTuple):
    """W [E, N, K]; SPAN: from a row of gate to that of up, 0: there is none."""

    N: int
    K: int
    SPAN: int


@jit
def gather_kernel(
    x, scales, found, found_scales, work, num_tokens, stride, found_stride,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the rows, of WIDTH elements, of ROWS pairs of one entry per program, and their scales if there are some.

    The scales of each of GROUPS of columns are `stride` apart.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.program_id(0)
    if entry < tl.load(work.size):
        expert, first = tl.load(work.expert + entry).to(tl.int64), tl.load(work.first + entry)
        count, row = tl.load(work.count + entry), tl.load(work.row + entry)
        within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        is_pair = first + within < count
        has = is_pair[:, None]
        pair = tl.load(work.pairs + expert * num_tokens + first + within, mask=is_pair, other=0)
        token = pair // TOP_K
        source = x + token.to(tl.int64)[:, None] * WIDTH
        to = found + (row + within).to(tl.int64)[:, None] * WIDTH
        for start in range(0, WIDTH, COLUMNS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = has & (column < WIDTH)
            tl.store(to + column, tl.load(source + column, mask=inside, other=0), mask=inside)
        if scales is not None:
            group = tl.arange(0, GROUPS_PAD)[:, None]
            inside = is_pair[None, :] & (group < GROUPS)
            value = tl.load(scales + group * stride + token[None, :], mask=inside, other=0.0)
            tl.store(found_scales + group * found_stride + (row + within)[None, :], value, mask=inside)


def gathered(
    x: torch.Tensor, scales: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return the rows of all pairs in the order of the work list, and their scales; behind the last are undefined.

    x: [T, K] of 8 or 16 bits, an even number of bytes a row; scales: float32 [T], or [T, K / 128] with those of a
    column side by side, as they are returned.
    """
    (num_tokens, top_k), work = routing.experts.shape, routing.work
    assert work is not None
    found = torch.empty((num_tokens * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    groups = 1 if scales is None or scales.dim() == 1 else scales.shape[1]
    found_scales, strides = None, (0, 0)
    if scales is not None:
        memory = torch.empty((groups, num_tokens * top_k), dtype=scales.dtype, device=x.device)
        found_scales = memory.t() if scales.dim() == 2 else memory[0]
        strides = scales.stride(-1), memory.stride(0)
    # Bytes are copied in twos.
    source, to = x.view(torch.int16), found.view(torch.int16)
    gather_kernel[(work.expert.shape[0], routing.block // 16)](
        source, scales, to, found_scales, work, num_tokens, *strides, TOP_K=top_k, WIDTH=source.shape[1],
        GROUPS=groups, GROUPS_PAD=next_power_of_2(groups), ROWS=16, COLUMNS=512, num_warps=4,
        **dependent_launch(x.device),
    )  # fmt: skip
    return found, found_scales


@constexpr_function
def tiles_across(n: int, span: int, columns: int) -> int:
    """Return the tiles, of so many columns of results, of an entry of the work list."""
    return -(-(span or n) // columns)


@gluon_jit
def tile_of(work, number, tiles, P: gl.constexpr, COLUMNS: gl.constexpr):
    """Return a tile: its expert, first column of results, first row of x, and where its pairs begin and end.

    One from `tiles` on has no pairs.
    """
    ACROSS: gl.constexpr = tiles_across(P.N, P.SPAN, COLUMNS)
    entry, there = number // ACROSS, number < tiles
    expert = gl.load(work.expert + entry, mask=there, other=0)
    row = gl.load(work.row + entry, mask=there, other=0)
    first = gl.load(work.first + entry, mask=there, other=0)
    return expert, number % ACROSS * COLUMNS, row, first, gl.load(work.count + entry, mask=there, other=0)


@gluon_jit
def pass_by(bars, number, STEPS: gl.constexpr, NS: gl.constexpr):
    """Give steps back as they come; return the number of the step after them. bars: of what is ready, and free."""
    ready, free = bars
    for _ in range(STEPS):
        mbarrier.wait(ready.index(number % NS), number // NS & 1)
        mbarrier.arrive(free.index(number % NS), count=1)
        number += 1
    return number


@gluon_jit
def write_gated(gate, up, staged, y, place, P: gl.constexpr):
    """Store silu(gate) · up [64, columns] of so many pairs at a row and a column, by way of shared memory."""
    row, column, left = place
    COLUMNS: gl.constexpr = gate.shape[1]
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    staged.store(silu_product(gate, up).to(y.dtype.element_ty))
    pair = gl.arange(0, 64, layout=gl.SliceLayout(1, copy))
    column = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, copy))
    to = y + (row + pair).to(gl.int64)[:, None] * P.SPAN + column[None, :]
    gl.store(to, staged.load(copy), mask=(pair < left)[:, None] & (column < P.SPAN)[None, :])


@gluon_jit
def write_sums(sums, z, pair, column, P: gl.constexpr):
    """Store sums [64, columns] in the rows of pairs [64]; -1: there is none."""
    pair = gl.convert_layout(pair, gl.SliceLayout(1, sums.type.layout))
    column = column + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    to = z + pair.to(gl.int64)[:, None] * P.N + column[None, :]
    gl.store(to, sums, mask=(pair >= 0)[:, None] & (column < P.N)[None, :])
