"""The ring of keys and values of `hopper_varlen.py`: tiles that one warp fetches through the bulk copy engine."""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import (
    TensorDescriptor,
    constexpr_function,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    tma,
)

#: Rows of the cache that the bulk copy engine can number; one past them reads as zeros.
MAX_CACHE_ROWS = 0x7FFFFF00
#: Rows of shared memory that repeat its swizzle: a copy begins with such a row.
MIN_BLOCK_SIZE = 8
#: Columns of one copy: what a swizzled row of shared memory holds.
BOX_COLUMNS = 64


@constexpr_function
def page_layout():
    """Return the layout of a tile of 16-bit keys or values in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def descriptor(cache, box_rows: int):
    """Return the bulk copy engine's view of the whole cache: rows [num_blocks · layers · 2 · Hkv · block_size, D]."""
    rows = cache.view(-1, cache.shape[-1])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [box_rows, BOX_COLUMNS], page_layout())


@gluon_jit
def look_up(table, start, span, head_row, page_rows, SHAPE: gl.constexpr, BN: gl.constexpr):
    """Return the first row of the cache of each box of keys from `start` on; span: first key in sight, and context."""
    first_key, context = span
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BN else BN
    rows = ()
    for box in gl.static_range(BN // BOX):
        key = start + box * BOX
        there = key < context
        if SHAPE.WINDOW:
            # Pages before the window are no longer the row's.
            there = there & (key + BOX > first_key)
        page = gl.load(table + key // BLOCK_SIZE, mask=there, other=0)
        # A row after the last one of the cache reads as zeros.
        rows = rows + (gl.where(there, page * page_rows + head_row + key % BLOCK_SIZE, 0x7FFFFF00),)
    return rows


@gluon_jit
def fetch(cache, tiles, stage, ready, rows, offset):
    """Start the copy of a tile of keys, or of the values `offset` rows after them.

    Pages after the context's end are zeros.
    """
    BN: gl.constexpr = tiles.shape[1]
    BOX: gl.constexpr = cache.block_type.shape[0]
    COLUMNS: gl.constexpr = cache.block_type.shape[1]
    mbarrier.expect(ready, BN * tiles.shape[2] * 2)
    # In shared memory columns 0 … 63 of all keys are followed by columns 64 … 127, and so on.
    parts = tiles.index(stage)._reinterpret(tiles.dtype, [BN * (tiles.shape[2] // COLUMNS), COLUMNS], tiles.layout)
    for box in gl.static_range(BN // BOX):
        at = gl.minimum(rows[box], 0x7FFFFF00 - offset) + offset
        for part in gl.static_range(tiles.shape[2] // COLUMNS):
            to = parts.slice(part * BN + box * BOX, BOX)
            tma.async_copy_global_to_shared(cache, [at, part * COLUMNS], ready, to)


@gluon_jit
def clear_tail(tiles, stage, valid, BN: gl.constexpr):
    """Clear the rows of a tile from `valid` on, in one warp: unowned rows may be NaN, and 0 · NaN is NaN."""
    LANES: gl.constexpr = tiles.shape[2] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    for first in gl.static_range(0, BN, 8):
        if first + 8 > valid:
            rows = tiles.index(stage).slice(first, 8)
            owned = rows.load(layout)
            rows.store(gl.where((first + row < valid)[:, None], owned, 0.0))


@gluon_jit
def produce(cache, landed, ring, pages, SHAPE: gl.constexpr):
    """Fetch tiles of keys and values into the ring: the program of the fetching warp."""
    ks, vs, k_ready, v_ready, k_free, v_free = ring
    NS: gl.constexpr = ks.shape[0]
    BN: gl.constexpr = ks.shape[1]
    table, k_row, v_rows, page_rows, begin, steps, first_key, context = pages
    for j in range(begin, steps):
        stage = (j - begin) % NS
        phase = ((j - begin) // NS + 1) & 1
        rows = look_up(table, j * BN, (first_key, context), k_row, page_rows, SHAPE, BN)
        mbarrier.wait(k_free.index(stage), phase)
        fetch(cache, ks, stage, k_ready.index(stage), rows, 0)
        mbarrier.wait(v_free.index(stage), phase)
        ready = v_ready.index(stage)
        if (j + 1) * BN <= context:
            fetch(cache, vs, stage, ready, rows, v_rows)
        else:
            fetch(cache, vs, stage, landed, rows, v_rows)
            mbarrier.wait(landed, 0)
            clear_tail(vs, stage, context - j * BN, BN)
            fence_async_shared()
            mbarrier.arrive(ready, count=1)
