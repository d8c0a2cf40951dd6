"""What a fused projection does with its sums: add to the residual, SwiGLU, or rotate and store queries, keys and values.

Gluon device functions over a tile y [BN rows of W, BM rows of x] in float32, in the layout of its matrix product.

Row r of a tile is half (r % 16) // 8 of pair 8 · (r // 16) + r % 8. A pair is then two registers of one thread, in the layouts
of mma and wgmma alike, and rotary and SwiGLU cost no exchange between threads.
"""

from __future__ import annotations

from photon_grpc.kernels.gluon import gl, gluon_jit


@gluon_jit
def tile_rows(program, BN: gl.constexpr, SPAN: gl.constexpr, layout: gl.constexpr):
    """int32 [BN], the rows of W in a program's tile: BN in order where SPAN is 0, else BN // 2 pairs.

    Pair p is the rows p // SPAN · 2 · SPAN + p % SPAN and SPAN behind it: with SPAN half a head its rotary pairs, with SPAN
    the intermediate size gate and up. BN // 2 divides SPAN.
    """
    row = gl.arange(0, BN, layout=layout)
    if SPAN == 0:
        return program * BN + row
    else:
        pair = program * (BN // 2) + row // 16 * 8 + row % 8
        return pair // SPAN * (2 * SPAN) + pair % SPAN + row % 16 // 8 * SPAN


@gluon_jit
def split_pairs(tile, BN: gl.constexpr, BM: gl.constexpr):
    """[BN, BM] -> first and second halves of its pairs, [BN // 16, 8, BM] each."""
    return gl.split(tile.reshape([BN // 16, 2, 8, BM]).permute([0, 2, 3, 1]))


@gluon_jit
def join_pairs(first, second, BN: gl.constexpr, BM: gl.constexpr, out: gl.constexpr):
    """The inverse of `split_pairs`, in layout `out`."""
    tile = gl.join(first, second).permute([0, 3, 1, 2]).reshape([BN, BM])
    return gl.convert_layout(tile, out)


@gluon_jit
def load_ahead(
    y, cos, sin, positions, num_rows,
    EPILOGUE: gl.constexpr, N: gl.constexpr, SPAN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, out: gl.constexpr,
):  # fmt: skip
    """Two tiles [BN, BM] for `finish`, asked for before the product so that they arrive while it runs.

    "rotary": cos and sin; "add": the residual, twice; "swiglu": zeros.
    """
    row = tile_rows(gl.program_id(0), BN, SPAN, gl.SliceLayout(1, out))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, out))
    valid = (token < num_rows)[None, :]
    first = gl.zeros([BN, BM], gl.float32, out)
    second = first
    if EPILOGUE == "add":
        first = gl.load(y + token[None, :] * N + row[:, None], mask=valid, other=0.0).to(gl.float32)
    if EPILOGUE == "rotary":
        position = gl.load(positions + token, mask=token < num_rows, other=0).to(gl.int32)
        at = position[None, :] * SPAN + (row % SPAN)[:, None]
        first = gl.load(cos + at, mask=valid, other=0.0)
        second = gl.load(sin + at, mask=valid, other=0.0)
    return first, second


@gluon_jit
def finish(
    tile, first, second, bias, y, pages, slot_mapping, num_tokens, num_rows, block_stride,
    EPILOGUE: gl.constexpr, N: gl.constexpr, SPAN: gl.constexpr, Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, out: gl.constexpr,
):  # fmt: skip
    """Stores a tile of sums; `first` and `second` are what `load_ahead` gave. Rows of x from num_rows on store nothing."""
    program = gl.program_id(0)
    row = tile_rows(program, BN, SPAN, gl.SliceLayout(1, out))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, out))
    valid = (token < num_rows)[None, :]
    kind: gl.constexpr = y.dtype.element_ty
    if bias is not None:
        tile += gl.load(bias + row).to(gl.float32)[:, None]
    if EPILOGUE == "add":
        gl.store(y + token[None, :] * N + row[:, None], (tile + first).to(kind), mask=valid)
    if EPILOGUE == "swiglu":
        gate, up = split_pairs(tile, BN, BM)
        product = gate / (1.0 + gl.exp(-gate)) * up
        tile = join_pairs(product, product, BN, BM, out)
        # Row p of gate stands for the pair; its partner, row SPAN + p of up, stores nothing.
        gl.store(y + token[None, :] * SPAN + row[:, None], tile.to(kind), mask=valid & (row < SPAN)[:, None])
    if EPILOGUE == "rotary":
        # A program's rows are all of one head.
        head = program * (BN // 2) // SPAN
        if head < Q_HEADS + KV_HEADS:
            a, b = split_pairs(tile, BN, BM)
            c, _ = split_pairs(first, BN, BM)
            s, _ = split_pairs(second, BN, BM)
            tile = join_pairs(a * c - b * s, b * c + a * s, BN, BM, out)
        if head < Q_HEADS:
            gl.store(y + token[None, :] * (Q_HEADS * 2 * SPAN) + row[:, None], tile.to(kind), mask=valid)
        else:
            slot = gl.load(slot_mapping + token, mask=token < num_rows, other=0)
            if num_tokens is not None:
                slot = gl.where(token < gl.load(num_tokens), slot, slot % BLOCK_SIZE)
            # Keys and values of a block are 2 · KV_HEADS planes in the order of their heads in W.
            at = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (2 * SPAN)
            plane = (head - Q_HEADS) * (BLOCK_SIZE * 2 * SPAN) + row % (2 * SPAN)
            gl.store(pages + at[None, :] + plane[:, None], tile.to(kind), mask=valid)
