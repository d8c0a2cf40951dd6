"""Keys and values in the shared memory of `gluon_decode.py`: look-up of pages, copies, and operands of products.

Numbers of 8 bits are copied as they are, and become operands in float16 in registers (`products_of_8_bits.py`). A
thread loads four neighbours at once. So the columns of the operand of keys are not those of a key in their order, but
in another order of each 16 (`dimensions_of`), in which queries are loaded. The operand of values is transposed, which
matrix loads do for 16 bits only; so its rows are not the columns of a value in their order, but in one in which a
thread's rows lie side by side (`columns_of`). The answers are stored by that order.
"""

from __future__ import annotations

from typing import NamedTuple

from photon_grpc.kernels.attention.products_of_8_bits import widened
from photon_grpc.kernels.lang.gluon import async_copy, constexpr_function, gl, gluon_jit


class PageShape(NamedTuple):
    """Constants of the pages that the kernels are compiled for: GROUP query heads for each of KV_HEADS key heads.

    WINDOW: keys that a query sees at most, 0 for all. QUERIES: the most that a row of the decode kernel has. CHUNK:
    numbers of a key in 16 bytes. PAIRS: the most (query, head) pairs that a program of several queries takes.
    """

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    BLOCK_SIZE: int
    WINDOW: int = 0
    QUERIES: int = 1
    CHUNK: int = 8
    PAIRS: int = 16


@constexpr_function
def bits(first: int, stop: int) -> list[int]:
    """Return the powers of two from `first` on, below `stop`."""
    return [1 << i for i in range(first.bit_length() - 1, stop.bit_length() - 1)]


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


@constexpr_function
def ring_layout(head_dim: int, chunk: int):
    """Return the layout of [keys, D] in shared memory: the 16 bytes of eight keys at a column lie in all banks."""
    chunks = head_dim // chunk
    return (
        gl.SwizzledSharedLayout(chunk, max(1, 8 // chunks), min(8, chunks), [1, 0])
        if chunk == 16
        else (gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    )


@constexpr_function
def keys_layout(head_dim: int, update: int, warps: int):
    """Return the layout of keys [keys, D] of 8 bits in registers: four neighbours of a key side by side."""
    registers = [[0, 1], [0, 2], [8, 0], *([0, d] for d in bits(16, head_dim))]
    registers += [[key, 0] for key in bits(16 * warps, update)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[key, 0] for key in bits(16, 16 * warps)], [], [update, head_dim]
    )  # fmt: skip


@constexpr_function
def rows_a_thread(head_dim: int, warps: int) -> int:
    """Return the rows of the operand of values, of 8 bits, that a thread has: columns side by side."""
    return head_dim // (8 * warps)


@constexpr_function
def values_layout(head_dim: int, update: int, warps: int):
    """Return the layout of values [keys, D] of 8 bits in registers: what a left operand's is of them transposed."""
    rows = rows_a_thread(head_dim, warps)
    registers = [[1, 0], [0, 1], [8, 0], *([key, 0] for key in bits(16, update)), *([0, d] for d in bits(2, rows))]
    lanes = [[2, 0], [4, 0], *([0, d] for d in bits(rows, 8 * rows))]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, d] for d in bits(8 * rows, head_dim)], [], [update, head_dim]
    )  # fmt: skip


@gluon_jit
def load_keys(ks, left: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Load keys [UPDATE, D] as a left operand."""
    if SHAPE.CHUNK == 8:
        return ks.load(left)
    else:
        D: gl.constexpr = SHAPE.HEAD_DIM
        UPDATE: gl.constexpr = TILE.UPDATE
        keys = widened(ks.load(keys_layout(D, UPDATE, TILE.KW)))
        keys = gl.permute(gl.reshape(keys, [UPDATE, D // 16, 4, 2, 2]), [0, 1, 3, 2, 4])
        # It moves nothing: a thread's numbers have another order.
        return gl.convert_layout(gl.reshape(keys, [UPDATE, D]), left)


@gluon_jit
def dimensions_of(column, SHAPE: gl.constexpr):
    """Return the columns of a key that are the columns `column` of the operand of keys."""
    if SHAPE.CHUNK == 8:
        return column
    else:
        return column // 16 * 16 + column % 8 // 2 * 4 + column // 8 % 2 * 2 + column % 2


@gluon_jit
def load_values(vs, left: gl.constexpr, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Load values [UPDATE, D], transposed, as a left operand [D, UPDATE]."""
    if SHAPE.CHUNK == 8:
        return vs.permute([1, 0]).load(left)
    else:
        KW: gl.constexpr = TILE.KW
        REPEATS: gl.constexpr = rows_a_thread(SHAPE.HEAD_DIM, KW) // 2
        values = widened(vs.load(values_layout(SHAPE.HEAD_DIM, TILE.UPDATE, KW)))
        values = gl.reshape(values, [TILE.UPDATE, KW, 8, REPEATS, 2])
        values = gl.reshape(gl.permute(values, [3, 1, 4, 2, 0]), [SHAPE.HEAD_DIM, TILE.UPDATE])
        return gl.convert_layout(values, left, assert_trivial=True)


@gluon_jit
def columns_of(row, SHAPE: gl.constexpr, TILE: gl.constexpr):
    """Return the columns of a value that are the rows `row` of the operand of values."""
    if SHAPE.CHUNK == 8:
        return row
    else:
        KW: gl.constexpr = TILE.KW
        REPEATS: gl.constexpr = rows_a_thread(SHAPE.HEAD_DIM, KW) // 2
        return ((row // 16 % KW * 8 + row % 8) * REPEATS + row // (16 * KW)) * 2 + row // 8 % 2


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


@gluon_jit
def scaled(answer, v_scale, SHAPE: gl.constexpr):
    """Return answers times the scale of values, if pages have one."""
    return answer if SHAPE.CHUNK == 8 else answer * v_scale
