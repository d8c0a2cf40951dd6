"""The ring of keys and values of `hopper_varlen.py` for pages of 8 bits, which four warps fill.

The products want 16 bits in shared memory, so numbers pass through registers, four in a word: while the products of a
tile run, the next one is loaded, and the one after it looked up.
"""

from __future__ import annotations

from photon_grpc.kernels.attention.products_of_8_bits import widened_words
from photon_grpc.kernels.lang.gluon import constexpr_function, fence_async_shared, gl, gluon_jit, mbarrier


@constexpr_function
def words_layout(head_dim: int):
    """Return the layout of a tile [keys, D / 4] of words: 16 bytes a thread."""
    threads = head_dim // 16
    return gl.BlockedLayout([1, 4], [32 // threads, threads], [4, 1], [1, 0])


@gluon_jit
def look_up(table, key, span, SHAPE: gl.constexpr, BN: gl.constexpr):
    """Return the pages of the keys of a tile from `key` on; span: first key in sight, and context."""
    first_key, context = span
    layout: gl.constexpr = words_layout(SHAPE.HEAD_DIM)
    keys = key + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    return gl.load(table + keys // SHAPE.BLOCK_SIZE, mask=(keys < context) & (keys >= first_key), other=0)


@gluon_jit
def load_words(plane, page, key, span, SHAPE: gl.constexpr, BN: gl.constexpr):
    """Load the words of a tile of a plane (the first word, from page to page), with zeros outside of the span."""
    words, block_stride = plane
    first_key, context = span
    layout: gl.constexpr = words_layout(SHAPE.HEAD_DIM)
    keys = (key + gl.arange(0, BN, layout=gl.SliceLayout(1, layout)))[:, None]
    column = gl.arange(0, SHAPE.HEAD_DIM // 4, layout=gl.SliceLayout(0, layout))[None, :]
    within = keys % SHAPE.BLOCK_SIZE * (SHAPE.HEAD_DIM // 4) + column
    inside = (keys < context) & (keys >= first_key) & (column >= 0)
    return gl.load(words + page[:, None].to(gl.int64) * block_stride + within, mask=inside, other=0)


@gluon_jit
def store_words(tiles, stage, words):
    """Store a tile as numbers of 16 bits."""
    BN: gl.constexpr = words.shape[0]
    first, second = widened_words(words)
    pairs = gl.reshape(gl.join(first, second), [BN, words.shape[1] * 2])
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    tiles.index(stage)._reinterpret(gl.int32, [BN, words.shape[1] * 2], layout).store(pairs)
    fence_async_shared()


@gluon_jit
def produce8(words, ring, rows, SHAPE: gl.constexpr):
    """Fill the ring: the program of the four warps. rows: as those of `hopper_ring.produce`, strides of words."""
    ks, vs, k_ready, v_ready, k_free, v_free = ring
    NS: gl.constexpr = ks.shape[0]
    BN: gl.constexpr = ks.shape[1]
    table, first_word, v_stride, block_stride, begin, steps, first_key, context = rows
    span = first_key, context
    keys = words + first_word, block_stride
    values = words + first_word + v_stride, block_stride
    page = look_up(table, begin * BN, span, SHAPE, BN)
    k = load_words(keys, page, begin * BN, span, SHAPE, BN)
    v = load_words(values, page, begin * BN, span, SHAPE, BN)
    for j in range(begin, steps):
        page = look_up(table, (j + 1) * BN, span, SHAPE, BN)
        stage = (j - begin) % NS
        phase = ((j - begin) // NS + 1) & 1
        mbarrier.wait(k_free.index(stage), phase)
        store_words(ks, stage, k)
        mbarrier.arrive(k_ready.index(stage), count=1)
        k = load_words(keys, page, (j + 1) * BN, span, SHAPE, BN)
        mbarrier.wait(v_free.index(stage), phase)
        store_words(vs, stage, v)
        mbarrier.arrive(v_ready.index(stage), count=1)
        v = load_words(values, page, (j + 1) * BN, span, SHAPE, BN)
