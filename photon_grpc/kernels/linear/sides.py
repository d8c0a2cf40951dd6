"""The copies of a packed weight into a product, with its scales, its zeros and the weight of the norm before it.

They travel in the ring of W itself: a step's copies fetch its packed bytes and what they are multiplied by, so that
neither is ever waited for alone. (A load into registers one step ahead would be late: a step takes 0.3 µs, memory 1.)
A scale that a whole row has is fetched once, with the first step.

A step of BK columns has `tiles.num_pieces`, each within one group of columns with a scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import async_copy, constexpr_function, gl, gluon_jit
from photon_grpc.kernels.linear.cut import slice_columns
from photon_grpc.kernels.linear.epilogue import tile_rows
from photon_grpc.kernels.linear.tiles import num_pieces, stored_width


class WeightOperand(NamedTuple):
    """A weight as a kernel takes it: w of 16 bits, or packed w with its scales, zeros and norm."""

    w: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    norm: torch.Tensor | None = None


@constexpr_function
def _copy_layout(width: int, parts: int, num_warps: int) -> Any:
    """Return the layout that copies [parts, rows, width] of 16 bits, 16 bytes a thread, warps along parts and rows."""
    lanes = min(32, width // 8)
    return gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [parts, num_warps // parts, 1], [2, 1, 0])


@constexpr_function
def _packed_copy(width: int, parts: int, num_warps: int) -> Any:
    """Return the layout that copies bytes [parts, rows, width] in the same way."""
    lanes = min(32, width // 16)
    return gl.BlockedLayout([1, 1, 16], [1, 32 // lanes, lanes], [parts, num_warps // parts, 1], [2, 1, 0])


@gluon_jit
def ring_of_groups(HAS: gl.constexpr, kind: gl.constexpr, S: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Return memory for scales or zeros, [NS, S, G, BN], or [1, S, 1, BN] of whole rows; None if there are none."""
    if HAS:
        SLOTS: gl.constexpr = TILE.NS if P.WEIGHT.GROUP > 0 else 1
        G: gl.constexpr = num_pieces(P.WEIGHT.GROUP, TILE.BK, P.K, P.SLICES)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        return gl.allocate_shared_memory(kind, [SLOTS, S, G, TILE.BN], plain)


@gluon_jit
def ring_of_norm(kind: gl.constexpr, S: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Return memory for the norm's weight, [NS, S, 1, BK]; None if there is none."""
    if P.WEIGHT.HAS_NORM:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        return gl.allocate_shared_memory(kind, [TILE.NS, S, 1, TILE.BK], plain)


@gluon_jit
def fetch_groups(to, source, number, first, S: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Begin the copy of scales or zeros to [S, G, BN], `first` columns behind the beginnings of S slices from `number`.

    Do nothing if `to` is None.
    """
    if to is not None:
        COLUMNS: gl.constexpr = slice_columns(P.K, P.SLICES)
        G: gl.constexpr = to.shape[1]
        at: gl.constexpr = _copy_layout(TILE.BN, S, TILE.KW)
        part = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, at)))
        piece = gl.arange(0, G, layout=gl.SliceLayout(0, gl.SliceLayout(2, at)))
        row = tile_rows(gl.program_id(0), TILE.BN, P.SPAN, gl.SliceLayout(0, gl.SliceLayout(1, at)))
        column = (first + (number + part) * COLUMNS)[:, None, None] + (piece * (TILE.BK // G))[None, :, None]
        real = (column + (row * 0)[None, None, :]) < P.K if P.SLICES * COLUMNS != P.K else None
        group = column // P.WEIGHT.GROUP if P.WEIGHT.GROUP > 0 else column * 0
        within = group * P.N + row[None, None, :]
        # Rows of a pair's half are neighbours in groups of eight, 16 bytes.
        pointers = gl.max_contiguous(gl.multiple_of(source + within, [1, 1, 16]), [1, 1, 8])
        async_copy.async_copy_global_to_shared(to, pointers, mask=real)


@gluon_jit
def fetch_norm(to, source, number, first, S: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Begin the copy of the norm's weight to [S, 1, BK], as `fetch_groups` does. Do nothing if `to` is None."""
    if to is not None:
        COLUMNS: gl.constexpr = slice_columns(P.K, P.SLICES)
        at: gl.constexpr = _copy_layout(TILE.BK, S, TILE.KW)
        part = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, at)))
        within = gl.arange(0, TILE.BK, layout=gl.SliceLayout(0, gl.SliceLayout(1, at)))
        column = first + ((number + part) * COLUMNS)[:, None, None] + within[None, None, :]
        real = column < P.K if P.SLICES * COLUMNS != P.K else None
        async_copy.async_copy_global_to_shared(to, source + column, mask=real)


@gluon_jit
def of_step(ring, slot, P: gl.constexpr):
    """Return the scales or zeros of a step; None for none."""
    if ring is not None:
        if P.WEIGHT.GROUP > 0:
            return ring.index(slot)
        else:
            return ring.index(0)


@gluon_jit
def fetch_sides(
    scales, zeros, norm, weight, slot, number, first,
    IS_FIRST: gl.constexpr, S: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Begin the copies of a step into `slot` of the rings that there are; those of whole rows with the first step."""
    if P.WEIGHT.GROUP > 0 or IS_FIRST:
        fetch_groups(of_step(scales, slot, P), weight.scales, number, first, S, P, TILE)
        fetch_groups(of_step(zeros, slot, P), weight.zeros, number, first, S, P, TILE)
    if norm is not None:
        fetch_norm(norm.index(slot), weight.norm, number, first, S, P, TILE)


@gluon_jit
def half_of(side, half: gl.constexpr, axis: gl.constexpr):
    """Return one half of a step's scales, zeros or norm along an axis; the whole where both halves share it."""
    if side is not None:
        if side.shape[axis] > 1:
            HALF: gl.constexpr = side.shape[axis] // 2
            return side.slice(half * HALF, HALF, dim=axis)
        else:
            return side


@gluon_jit
def packed_columns(number, S: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Return the bytes [S, 1, width] of a row at which the first steps of S slices from `number` on are."""
    at: gl.constexpr = _packed_copy(stored_width(P.WEIGHT.BITS, TILE.BK), S, TILE.KW)
    COLUMNS: gl.constexpr = slice_columns(P.K, P.SLICES)
    part = gl.arange(0, S, layout=gl.SliceLayout(1, gl.SliceLayout(2, at)))
    byte = gl.arange(0, stored_width(P.WEIGHT.BITS, TILE.BK), layout=gl.SliceLayout(0, gl.SliceLayout(1, at)))
    return ((number + part) * stored_width(P.WEIGHT.BITS, COLUMNS))[:, None, None] + byte[None, None, :]


@gluon_jit
def packed_pointers(w, within, S: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Return pointers to the packed bytes of the first steps [S, BN, width]."""
    at: gl.constexpr = within.type.layout
    row = tile_rows(gl.program_id(0), TILE.BN, P.SPAN, gl.SliceLayout(0, gl.SliceLayout(2, at)))
    return w + row[None, :, None] * stored_width(P.WEIGHT.BITS, P.K) + within


@gluon_jit
def packed_left(within, P: gl.constexpr, TILE: gl.constexpr):
    """Return the bytes [S, BN, width] that are left of a row, the same for all 16 that are copied at a time.

    None where every slice is whole.
    """
    if P.SLICES * slice_columns(P.K, P.SLICES) != P.K:
        row = gl.arange(0, TILE.BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, within.type.layout)))
        return stored_width(P.WEIGHT.BITS, P.K) - within // 16 * 16 + (row * 0)[None, :, None]
