"""The part of a row that one program of `gluon_decode.py` takes: its queries, and which of its keys."""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import gl, gluon_jit


@gluon_jit
def share_of(first, context, split, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Return the first key of a split, the one after its last, and how many splits the row has; all are whole lanes.

    They are the lanes from key `first` on. The first split skips updates before it, in which no query sees a key.
    """
    LANE: gl.constexpr = TILE.LANE
    if SHAPE.WINDOW:
        origin = first // LANE * LANE
        context = context - origin
    num_lanes = (context + LANE - 1) // LANE
    most_splits = gl.maximum(gl.minimum(num_lanes, gl.num_programs(2)), 1)
    length = (num_lanes + most_splits - 1) // most_splits * LANE
    begin = split * length
    stop = gl.minimum(begin + length, context)
    num_splits = (context + length - 1) // gl.maximum(length, 1)
    if SHAPE.WINDOW:
        begin = gl.maximum(begin + origin, first // TILE.UPDATE * TILE.UPDATE)
        stop = stop + origin
    return begin, stop, num_splits


@gluon_jit
def queries_of(rows, row, SHAPE: gl.constexpr):
    """Return a row's first query, how many it has, its keys, and the first of them that a query sees.

    A row that the kernel leaves alone has no keys.
    """
    query_start, context_len, _ = rows
    context = gl.load(context_len + row)
    query_row, count = row, 1
    if query_start is not None:
        query_row = gl.load(query_start + row)
        count = gl.load(query_start + row + 1) - query_row
        if SHAPE.QUERIES == 1:
            context = gl.where(count == 1, context, 0)
        else:
            context = gl.where((count > 0) & (count <= SHAPE.QUERIES), context, 0)
    first = 0
    if SHAPE.WINDOW:
        first = gl.maximum(context - count + 1 - SHAPE.WINDOW, 0)
    return query_row, count, context, first


@gluon_jit
def bounds_of(begin, context, count, num_steps, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Return where the updates of a program before the last begin that mask a window's start, none, and later keys."""
    last = num_steps - 1
    clear = 0
    if SHAPE.WINDOW:
        clear = gl.maximum(context - SHAPE.WINDOW - begin + TILE.UPDATE - 1, 0) // TILE.UPDATE
        clear = gl.minimum(clear, last)
    masked = last
    if SHAPE.QUERIES > 1:
        masked = gl.minimum((context - count + 1 - begin) // TILE.UPDATE, last)
        masked = gl.maximum(masked, clear)
    return 0, clear, masked, last
