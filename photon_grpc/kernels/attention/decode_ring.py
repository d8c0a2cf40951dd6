"""Pages of keys and values in shared memory, for `gluon_decode.py`: layouts of copies, look-up and fetch."""

from __future__ import annotations

from typing import NamedTuple

from photon_grpc.kernels.lang.gluon import async_copy, constexpr_function, gl, gluon_jit


class PageShape(NamedTuple):
    """Constants of the pages that the kernels are compiled for: GROUP query heads for each of KV_HEADS key heads.

    WINDOW: keys that a query sees at most, 0 for all. QUERIES: the most that a row of the decode kernel has. CHUNK:
    numbers of a key in 16 bytes.
    """

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    BLOCK_SIZE: int
    WINDOW: int = 0
    QUERIES: int = 1
    CHUNK: int = 8


@constexpr_function
def copy_layout(head_dim: int, warps: int, chunk: int):
    """Return the layout of copies [keys, D]: 16 bytes a thread, neighbouring threads along D."""
    threads = head_dim // chunk
    return gl.BlockedLayout([1, chunk], [32 // threads, threads], [warps, 1], [1, 0])


@constexpr_function
def paged_layout(head_dim: int, warps: int, chunk: int, block_size: int):
    """Return `copy_layout` of [pages, keys of a page, D], flattened the layout of [keys, D]."""
    threads = head_dim // chunk
    of_page = max(1, min(warps, block_size * threads // 32))
    return gl.BlockedLayout([1, 1, chunk], [1, 32 // threads, threads], [warps // of_page, of_page, 1], [2, 1, 0])


@gluon_jit
def look_up(table, key, stop, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Return the page of the UPDATE keys from `key` on: one number if they lie in one page, else one a page or key."""
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    UPDATE: gl.constexpr = TILE.UPDATE
    if BLOCK_SIZE % UPDATE == 0:
        page = gl.load(table + key // BLOCK_SIZE, mask=key < stop, other=0)
    elif UPDATE % BLOCK_SIZE == 0 and BLOCK_SIZE * SHAPE.HEAD_DIM >= 32 * SHAPE.CHUNK:
        layout: gl.constexpr = paged_layout(SHAPE.HEAD_DIM, TILE.KW, SHAPE.CHUNK, BLOCK_SIZE)
        number = gl.arange(0, UPDATE // BLOCK_SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        page = gl.load(table + key // BLOCK_SIZE + number, mask=key + number * BLOCK_SIZE < stop, other=0)
    else:
        copy: gl.constexpr = copy_layout(SHAPE.HEAD_DIM, TILE.KW, SHAPE.CHUNK)
        keys = key + gl.arange(0, UPDATE, layout=gl.SliceLayout(1, copy))
        page = gl.load(table + keys // BLOCK_SIZE, mask=keys < stop, other=0)[:, None]
    return page


@gluon_jit
def fetch(ks, vs, keys, page, key, span, block_stride, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Start the copies of UPDATE keys and values from `key` on, with zeros outside of `span`: first key, and stop."""
    first, stop = span
    HEAD_DIM: gl.constexpr = SHAPE.HEAD_DIM
    BLOCK_SIZE: gl.constexpr = SHAPE.BLOCK_SIZE
    V_OFFSET: gl.constexpr = SHAPE.KV_HEADS * BLOCK_SIZE * HEAD_DIM
    UPDATE: gl.constexpr = TILE.UPDATE
    copy: gl.constexpr = copy_layout(HEAD_DIM, TILE.KW, SHAPE.CHUNK)
    number = gl.arange(0, UPDATE, layout=gl.SliceLayout(1, copy))[:, None]
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, copy))[None, :]
    if BLOCK_SIZE % UPDATE == 0:
        at = keys + page.to(gl.int64) * block_stride + key % BLOCK_SIZE * HEAD_DIM + (number * HEAD_DIM + column)
    elif UPDATE % BLOCK_SIZE == 0 and BLOCK_SIZE * HEAD_DIM >= 32 * SHAPE.CHUNK:
        # One load a page, whose number then stands beside each of its keys.
        of_keys = page[:, None] + gl.full(
            [UPDATE // BLOCK_SIZE, BLOCK_SIZE], 0, gl.int32, page.type.layout.parent
        )  # fmt: skip
        of_keys = gl.convert_layout(gl.reshape(of_keys, [UPDATE]), gl.SliceLayout(1, copy), assert_trivial=True)
        page = of_keys[:, None]
        at = keys + (page.to(gl.int64) * block_stride + number % BLOCK_SIZE * HEAD_DIM) + column
    else:
        at = keys + (page.to(gl.int64) * block_stride + (key + number) % BLOCK_SIZE * HEAD_DIM) + column
    inside = (key + number < stop) & (column >= 0)
    if SHAPE.WINDOW:
        # Pages before the window are no longer the row's.
        inside = inside & (key + number >= first)
    async_copy.async_copy_global_to_shared(ks, at, mask=inside)
    async_copy.async_copy_global_to_shared(vs, at + V_OFFSET, mask=inside)
