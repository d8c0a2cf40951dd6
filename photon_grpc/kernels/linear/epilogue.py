"""What a fused projection does with its sums: add to the residual, SwiGLU, rotate and store queries, keys and values; or, of logits,
store them or keep the best of the tile.

Gluon device functions over a tile [BN rows of W, BM rows of x] in float32. Sums arrive in the layout of their matrix product,
where a thread's neighbours are far apart in memory; they are exchanged once, into `tile_layout`, and from there on every
thread loads and stores up to eight neighbours at once.

Row r of a tile of pairs is half (r % 16) // 8 of pair 8 · (r // 16) + r % 8. `tile_layout` keeps both halves in one thread, so
that rotary and SwiGLU cost no exchange.
"""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.gluon import constexpr_function, gl, gluon_jit
from photon_grpc.kernels.sampling.gumbel import gumbel


@constexpr_function
def row_layout(rows: int, tokens: int, warps: int) -> Any:
    """[rows, tokens]: up to eight neighbouring rows a thread, then threads along the rows, then along the tokens."""
    return gl.DistributedLinearLayout(*_bases(rows, tokens, warps), [], [rows, tokens])


@constexpr_function
def tile_layout(rows: int, tokens: int, warps: int, paired: bool, slices: int = 0) -> Any:
    """[rows, tokens], or [slices, rows, tokens] with all slices in one thread; where paired, pairs as `row_layout` of halves."""
    if paired:
        bases = _bases(rows // 2, tokens, warps)
        registers, lanes, groups = ([[r if r < 8 else 2 * r, t] for r, t in part] for part in bases)
        registers = [[8, 0], *registers]
    else:
        registers, lanes, groups = _bases(rows, tokens, warps)
    if not slices:
        return gl.DistributedLinearLayout(registers, lanes, groups, [], [rows, tokens])
    registers, lanes, groups = ([[0, r, t] for r, t in part] for part in (registers, lanes, groups))
    registers += [[1 << bit, 0, 0] for bit in range(slices.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [slices, rows, tokens])


@constexpr_function
def _bases(rows: int, tokens: int, warps: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """What each bit of a register's, lane's and warp's number adds to (row, token); zeros where threads are left over."""
    bits = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    vector = min(rows, 8, max(2, rows * tokens // (32 * warps))).bit_length() - 1
    registers, rest = bits[:vector], bits[vector:] + [[0, 1 << i] for i in range(tokens.bit_length() - 1)]
    num_warp_bits = warps.bit_length() - 1
    threads = rest[: 5 + num_warp_bits]
    threads += [[0, 0]] * (5 + num_warp_bits - len(threads))
    return registers + rest[5 + num_warp_bits :], threads[:5], threads[5:]


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
def split_pairs(tile, BN: gl.constexpr, BM: gl.constexpr, halves: gl.constexpr):
    """[BN, BM] in a paired `tile_layout` -> first and second halves of its pairs, [BN // 2, BM] each."""
    first, second = gl.split(tile.reshape([BN // 16, 2, 8, BM]).permute([0, 2, 3, 1]))
    first = gl.convert_layout(first.reshape([BN // 2, BM]), halves, assert_trivial=True)
    return first, gl.convert_layout(second.reshape([BN // 2, BM]), halves, assert_trivial=True)


@gluon_jit
def load_ahead(
    y, cos, sin, positions, num_rows,
    EPILOGUE: gl.constexpr, N: gl.constexpr, SPAN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, KW: gl.constexpr,
):  # fmt: skip
    """Two tiles for `finish`, asked for before the product so that they arrive while it runs.

    "rotary": cos and sin [BN // 2, BM]; "add": the residual [BN, BM], twice; "swiglu": zeros.
    """
    ROWS: gl.constexpr = BN if SPAN == 0 else BN // 2
    at: gl.constexpr = row_layout(ROWS, BM, KW)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, at))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, at))
    valid = (token < num_rows)[None, :]
    first = gl.zeros([ROWS, BM], gl.float32, at)
    second = first
    if EPILOGUE == "add":
        first = gl.load(y + token[None, :] * N + row[:, None], mask=valid, other=0.0).to(gl.float32)
    if EPILOGUE == "rotary":
        position = gl.load(positions + token, mask=token < num_rows, other=0).to(gl.int32)
        angle = position[None, :] * SPAN + (row % SPAN)[:, None]
        first = gl.load(cos + angle, mask=valid, other=0.0)
        second = gl.load(sin + angle, mask=valid, other=0.0)
    return first, second


@gluon_jit
def finish(
    tile, first, second, bias, y, pages, slot_mapping, num_rows, block_stride,
    slots, context_len, temperature, seed, output_index, num_prompt, tops, ids,
    EPILOGUE: gl.constexpr, N: gl.constexpr, SPAN: gl.constexpr, Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, KW: gl.constexpr,
):  # fmt: skip
    """Stores a tile of sums in its `tile_layout`; `first` and `second` are what `load_ahead` gave.

    Rows of x from num_rows on store nothing.
    """
    ROWS: gl.constexpr = BN if SPAN == 0 else BN // 2
    at: gl.constexpr = row_layout(ROWS, BM, KW)
    whole: gl.constexpr = tile_layout(BN, BM, KW, SPAN > 0)
    kind: gl.constexpr = y.dtype.element_ty
    program = gl.program_id(0)
    row = program * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, at))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, at))
    valid = (token < num_rows)[None, :]
    if bias is not None:
        tile += gl.load(bias + tile_rows(program, BN, SPAN, gl.SliceLayout(1, whole))).to(gl.float32)[:, None]
    if EPILOGUE == "logits":
        gl.store(y + token[None, :] * N + row[:, None], tile, mask=valid)
    if EPILOGUE == "draw":
        keep_best(
            tile, y, slots, context_len, temperature, seed, output_index, num_prompt, tops, ids, num_rows,
            N // BN, BM, BN, whole,
        )  # fmt: skip
    if EPILOGUE == "add":
        gl.store(y + token[None, :] * N + row[:, None], (tile + first).to(kind), mask=valid)
    if EPILOGUE == "swiglu":
        gate, up = split_pairs(tile, BN, BM, at)
        product = gate / (1.0 + gl.exp(-gate)) * up
        gl.store(y + token[None, :] * SPAN + row[:, None], product.to(kind), mask=valid)
    if EPILOGUE == "rotary":
        a, b = split_pairs(tile, BN, BM, at)
        # A program's rows are all of one head.
        head = program * (BN // 2) // SPAN
        column = row % SPAN
        if head < Q_HEADS:
            to = y + token[None, :] * (Q_HEADS * 2 * SPAN) + (head * 2 * SPAN + column)[:, None]
            gl.store(to, (a * first - b * second).to(kind), mask=valid)
            gl.store(to + SPAN, (b * first + a * second).to(kind), mask=valid)
        else:
            slot = gl.load(slot_mapping + token, mask=token < num_rows, other=0)
            # Keys and values of a block are 2 · KV_HEADS planes in the order of their heads in W.
            in_pages = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (2 * SPAN)
            plane = (head - Q_HEADS) * (BLOCK_SIZE * 2 * SPAN) + column
            to = pages + in_pages[None, :] + plane[:, None]
            is_key = head < Q_HEADS + KV_HEADS
            gl.store(to, gl.where(is_key, a * first - b * second, a).to(kind), mask=valid)
            gl.store(to + SPAN, gl.where(is_key, b * first + a * second, b).to(kind), mask=valid)


@gluon_jit
def keep_best(
    logits, values, slots, context_len, temperature, seed, output_index, num_prompt, tops, ids, num_rows,
    TILES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of every token: the best value of the tile and its id, and the highest logit (infinite where one is NaN), as `draw.py` has them."""
    program = gl.program_id(0)
    number = program * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, layout))
    is_row = token < num_rows
    slot = gl.load(slots + token, mask=is_row, other=0)
    heat = gl.load(temperature + slot, mask=is_row, other=0.0)
    top = gl.max(gl.where(logits != logits, float("inf"), logits), 0)
    value = logits
    if gl.max(heat, 0) >= 1e-5:
        key = gl.load(seed + slot, mask=is_row, other=0)
        at = gl.load(context_len + token, mask=is_row, other=0) - gl.load(num_prompt + slot, mask=is_row, other=0)
        index = gl.load(output_index + slot, mask=is_row, other=0)
        numbers = number[:, None] + gl.zeros([BN, BM], gl.int32, layout)
        noise = gumbel(key[None, :], at[None, :], index[None, :], numbers)
        is_drawn = (heat >= 1e-5)[None, :]
        value = gl.where(is_drawn, gl.div_rn(logits, gl.where(heat >= 1e-5, heat, 1.0)[None, :]) + noise, logits)
    value = gl.where(value == value, value, -float("inf"))
    best = gl.max(value, 0)
    place = token * TILES + program
    gl.store(values + place, best, mask=is_row)
    gl.store(tops + place, top, mask=is_row)
    gl.store(ids + place, gl.min(gl.where(value == best[None, :], number[:, None], 2147483647), 0), mask=is_row)
