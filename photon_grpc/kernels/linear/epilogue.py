"""Ends of a fused projection, which consume its sums.

They add to the residual, apply SwiGLU or GeGLU, rotate and store queries, keys and values, store the sums as they are,
or keep the best logit of the tile.

Gluon device functions over a tile [BN rows of W, BM rows of x] in float32, handed to `gemv_kernel` and `wgmma_kernel`
in pairs:

    ahead = load(result, P, TILE)            asked for before the product: arrives while it runs
    store(tile, ahead, result, P, TILE)      rows of x from num_rows on store nothing

`result` is (y, operands, num_rows, place), where `operands` is a tuple of the pair's own and `place` the number of the
tile along W and its first row of x. Sums arrive in the layout of their
matrix product, where a thread's neighbours are far apart in memory; they are exchanged once, into `tile_layout`, and
from there on every thread loads and stores up to eight neighbours at once.

Row r of a tile of pairs is half (r % 16) // 8 of pair 8 · (r // 16) + r % 8. `tile_layout` keeps both halves in one
thread, so that rotary and SwiGLU cost no exchange.
"""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.lang.formulas import gated, rotated
from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit
from photon_grpc.kernels.lang.page_scales import page_numbers
from photon_grpc.kernels.lang.squares import tile_groups
from photon_grpc.kernels.sampling.noise import gumbel


@constexpr_function
def row_layout(rows: int, tokens: int, warps: int) -> Any:
    """Return the layout of [rows, tokens]: up to eight neighbouring rows a thread, threads along rows, then tokens."""
    return gl.DistributedLinearLayout(*_bases(rows, tokens, warps), [], [rows, tokens])


@constexpr_function
def tile_layout(rows: int, tokens: int, warps: int, paired: bool, slices: int = 0) -> Any:
    """Return the layout of [rows, tokens] or [slices, rows, tokens], slices in one thread; pairs as in `row_layout`."""
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
    """Return the (row, token) that each bit of a register's, lane's and warp's number adds; zeros for spare threads."""
    bits = [[1 << i, 0] for i in range(rows.bit_length() - 1)]
    vector = min(rows, 8, max(2, rows * tokens // (32 * warps))).bit_length() - 1
    registers, rest = bits[:vector], bits[vector:] + [[0, 1 << i] for i in range(tokens.bit_length() - 1)]
    num_warp_bits = warps.bit_length() - 1
    threads = rest[: 5 + num_warp_bits]
    threads += [[0, 0]] * (5 + num_warp_bits - len(threads))
    return registers + rest[5 + num_warp_bits :], threads[:5], threads[5:]


@constexpr_function
def output_layout(rows: int, tokens: int, warps: int, span: int) -> Any:
    """Return the layout of a tile's result: [rows, tokens], or [rows // 2, tokens] of pairs at distance `span`."""
    return row_layout(rows // 2 if span else rows, tokens, warps)


@gluon_jit
def tile_rows(program, BN: gl.constexpr, SPAN: gl.constexpr, layout: gl.constexpr):
    """Return int32 [BN], the rows of W in a program's tile: BN in order if SPAN is 0, else BN // 2 pairs.

    Pair p is the row p // SPAN · 2 · SPAN + p % SPAN and the row SPAN after it. They are rotary pairs where SPAN is
    half a head, gate and up where SPAN is the intermediate size. BN // 2 divides SPAN.
    """
    row = gl.arange(0, BN, layout=layout)
    if SPAN == 0:
        return program * BN + row
    else:
        pair = program * (BN // 2) + row // 16 * 8 + row % 8
        return pair // SPAN * (2 * SPAN) + pair % SPAN + row % 16 // 8 * SPAN


@gluon_jit
def split_pairs(tile, P: gl.constexpr, TILE: gl.constexpr):
    """Split [BN, BM] in a paired `tile_layout` into halves of its pairs, [BN // 2, BM] each in `output_layout`."""
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    halves: gl.constexpr = output_layout(BN, BM, TILE.KW, P.SPAN)
    first, second = gl.split(tile.reshape([BN // 16, 2, 8, BM]).permute([0, 2, 3, 1]))
    first = gl.convert_layout(first.reshape([BN // 2, BM]), halves, assert_trivial=True)
    return first, gl.convert_layout(second.reshape([BN // 2, BM]), halves, assert_trivial=True)


@gluon_jit
def normalised(tile, totals, norm, kind: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Return r · tile + b, r = 1 / sqrt(totals [BM] / K + eps), b [N] or None; norm: eps and b.

    Sums are rounded first, as the matrix library rounds them; not in float16, which ends at 65,504.
    """
    eps, bias = norm
    whole: gl.constexpr = tile_layout(TILE.BN, P.BM, TILE.KW, P.SPAN > 0)
    if kind == gl.bfloat16:
        tile = tile.to(kind).to(gl.float32)
    scale = gl.rsqrt(gl.convert_layout(totals, gl.SliceLayout(0, whole)) / P.K + eps)[None, :]
    if bias is None:
        return tile * scale
    else:
        row = tile_rows(gl.program_id(0), TILE.BN, P.SPAN, gl.SliceLayout(1, whole))
        return gl.fma(tile, scale, gl.load(bias + row).to(gl.float32)[:, None])


@gluon_jit
def exchanged(sums, factors, to, P: gl.constexpr, TILE: gl.constexpr):
    """Return a product [BN, BM] as ends take it: r · product + b, factors r [num_rows] and b [N] or None."""
    y, _, num_rows, place = to
    norms, bias = factors
    program, first = place
    whole: gl.constexpr = tile_layout(TILE.BN, P.BM, TILE.KW, P.SPAN > 0)
    if y.dtype.element_ty == gl.bfloat16:
        # Rounded as the matrix library rounds, before it is exchanged.
        sums = sums.to(gl.bfloat16)
    tile = gl.convert_layout(sums, whole).to(gl.float32)
    if norms is not None:
        token = first + gl.arange(0, P.BM, layout=gl.SliceLayout(0, whole))
        scale = gl.load(norms + token, mask=token < num_rows, other=0.0)[None, :]
        if bias is None:
            tile = tile * scale
        else:
            row = tile_rows(program, TILE.BN, P.SPAN, gl.SliceLayout(1, whole))
            tile = gl.fma(tile, scale, gl.load(bias + row).to(gl.float32)[:, None])
    return tile


@gluon_jit
def output_indices(place, P: gl.constexpr, TILE: gl.constexpr):
    """Return int32 rows of the result [BN], or [BN // 2] of pairs, and tokens [BM], in slices of `output_layout`."""
    program, first = place
    ROWS: gl.constexpr = TILE.BN // 2 if P.SPAN else TILE.BN
    at: gl.constexpr = output_layout(TILE.BN, P.BM, TILE.KW, P.SPAN)
    row = program * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, at))
    return row, first + gl.arange(0, P.BM, layout=gl.SliceLayout(0, at))


@gluon_jit
def load_nothing(result, P: gl.constexpr, TILE: gl.constexpr):
    """Load nothing: only the sums are stored."""


@gluon_jit
def load_residual(result, P: gl.constexpr, TILE: gl.constexpr):
    """Load y [BN, BM], with the bias added and rounded, in float32; operands: bias [N] or None, partial."""
    y, operands, num_rows, place = result
    bias = operands[0]
    row, token = output_indices(place, P, TILE)
    residual = gl.load(y + token[None, :] * P.N + row[:, None], mask=(token < num_rows)[None, :], other=0.0)
    residual = residual.to(gl.float32)
    if bias is not None:
        residual = (residual + gl.load(bias + row).to(gl.float32)[:, None]).to(y.dtype.element_ty).to(gl.float32)
    return residual


@gluon_jit
def add_residual(tile, residual, result, P: gl.constexpr, TILE: gl.constexpr):
    """Store y = residual + tile, the tile rounded first, and the sums of its squares by `squares.py` if asked for."""
    y, operands, num_rows, place = result
    partial = operands[1]
    row, token = output_indices(place, P, TILE)
    kind: gl.constexpr = y.dtype.element_ty
    added = (tile.to(kind).to(gl.float32) + residual).to(kind)
    gl.store(y + token[None, :] * P.N + row[:, None], added, mask=(token < num_rows)[None, :])
    if partial is not None:
        stored = added.to(gl.float32)
        sums = tile_groups(stored * stored)
        at: gl.constexpr = sums.type.layout
        group = place[0] * (TILE.BN // 16) + gl.arange(0, TILE.BN // 16, layout=gl.SliceLayout(1, at))
        token = place[1] + gl.arange(0, P.BM, layout=gl.SliceLayout(0, at))
        to = partial + token[None, :] * (P.N // 16) + group[:, None]
        gl.store(to, sums, mask=(token < num_rows)[None, :] & (group >= 0)[:, None])


@gluon_jit
def store_swiglu(tile, ahead, result, P: gl.constexpr, TILE: gl.constexpr):
    """Store y [num_rows, SPAN] = silu(gate) · up."""
    store_gated(tile, result, "silu", P, TILE)


@gluon_jit
def store_geglu(tile, ahead, result, P: gl.constexpr, TILE: gl.constexpr):
    """Store y [num_rows, SPAN] = gelu(gate) · up."""
    store_gated(tile, result, "gelu", P, TILE)


#: Activation -> the end that stores its product.
STORE_GATED = {"silu": store_swiglu, "gelu": store_geglu}


@gluon_jit
def store_gated(tile, result, ACTIVATION: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr):
    """Store y [num_rows, SPAN], the activation of the gate times up."""
    y, _, num_rows, place = result
    row, token = output_indices(place, P, TILE)
    gate, up = split_pairs(tile, P, TILE)
    to = y + token[None, :] * P.SPAN + row[:, None]
    gl.store(to, gated(gate, up, ACTIVATION).to(y.dtype.element_ty), mask=(token < num_rows)[None, :])


@gluon_jit
def load_angles(result, P: gl.constexpr, TILE: gl.constexpr):
    """Load cos and sin [BN // 2, BM]; operands: Rotation, pages, elements of one block, PageScales or None."""
    _, operands, num_rows, place = result
    rotation = operands[0]
    row, token = output_indices(place, P, TILE)
    valid = (token < num_rows)[None, :]
    position = gl.load(rotation.positions + token, mask=token < num_rows, other=0).to(gl.int32)
    angle = position[None, :] * P.SPAN + (row % P.SPAN)[:, None]
    cos = gl.load(rotation.cos + angle, mask=valid, other=0.0)
    return cos, gl.load(rotation.sin + angle, mask=valid, other=0.0)


@gluon_jit
def store_heads(tile, angles, result, P: gl.constexpr, TILE: gl.constexpr):
    """Store rotated queries in y [num_rows, Q_HEADS · D], rotated keys and unchanged values in their pages."""
    cos, sin = angles
    y, operands, num_rows, place = result
    rotation, pages, block_stride, scales = operands
    row, token = output_indices(place, P, TILE)
    valid = (token < num_rows)[None, :]
    kind: gl.constexpr = y.dtype.element_ty
    a, b = split_pairs(tile, P, TILE)
    rotated_a, rotated_b = rotated(a, b, cos, sin)
    # All rows of a program belong to one head.
    head = place[0] * (TILE.BN // 2) // P.SPAN
    column = row % P.SPAN
    if head < P.HEADS.Q:
        to = y + token[None, :] * (P.HEADS.Q * 2 * P.SPAN) + (head * 2 * P.SPAN + column)[:, None]
        gl.store(to, rotated_a.to(kind), mask=valid)
        gl.store(to + P.SPAN, rotated_b.to(kind), mask=valid)
    else:
        slot = gl.load(rotation.slot_mapping + token, mask=token < num_rows, other=0)
        # Keys and values of a block are 2 · KV planes in the order of their heads in W.
        in_pages = slot // P.HEADS.BLOCK_SIZE * block_stride + slot % P.HEADS.BLOCK_SIZE * (2 * P.SPAN)
        plane = (head - P.HEADS.Q) * (P.HEADS.BLOCK_SIZE * 2 * P.SPAN) + column
        cells = pages + in_pages[None, :] + plane[:, None]
        is_key = head < P.HEADS.Q + P.HEADS.KV
        if scales is not None and scales.offset is not None:
            at = scales.offset + (head - P.HEADS.Q) * (2 * P.SPAN) + column
            of_keys = (column >= 0) & is_key
            rotated_a = rotated_a - gl.load(at, mask=of_keys, other=0.0)[:, None]
            rotated_b = rotated_b - gl.load(at + P.SPAN, mask=of_keys, other=0.0)[:, None]
        first, second = gl.where(is_key, rotated_a, a), gl.where(is_key, rotated_b, b)
        if scales is not None:
            inverse = gl.load(scales.inverse + head - P.HEADS.Q)
            counted = valid & (slot >= P.HEADS.BLOCK_SIZE)[None, :]
            first = page_numbers(first, inverse, scales.saturated, counted)
            second = page_numbers(second, inverse, scales.saturated, counted)
        gl.store(cells, first.to(pages.dtype.element_ty), mask=valid)
        gl.store(cells + P.SPAN, second.to(pages.dtype.element_ty), mask=valid)


@gluon_jit
def store_sums(tile, ahead, result, P: gl.constexpr, TILE: gl.constexpr):
    """Store y [num_rows, N]."""
    y, _, num_rows, place = result
    row, token = output_indices(place, P, TILE)
    to = y + token[None, :] * P.N + row[:, None]
    gl.store(to, tile.to(y.dtype.element_ty), mask=(token < num_rows)[None, :])


@gluon_jit
def store_best(logits, ahead, result, P: gl.constexpr, TILE: gl.constexpr):
    """Store what TileBest has for every token: the best value of the tile, its id, and the highest logit.

    operands: SamplingMetadata, tops, ids.
    """
    values, operands, num_rows, place = result
    metadata, tops, ids = operands
    BM: gl.constexpr = P.BM
    BN: gl.constexpr = TILE.BN
    layout: gl.constexpr = tile_layout(BN, BM, TILE.KW, False)
    program = place[0]
    number = program * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, BM, layout=gl.SliceLayout(0, layout))
    is_row = token < num_rows
    slot = gl.load(metadata.slots + token, mask=is_row, other=0)
    temperature = gl.load(metadata.temperature + slot, mask=is_row, other=0.0)
    top = gl.max(gl.where(logits != logits, float("inf"), logits), 0)
    value = logits
    if gl.max(temperature, 0) > 0.0:
        seed = gl.load(metadata.seed + slot, mask=is_row, other=0)
        position = gl.load(metadata.context_len + token, mask=is_row, other=0)
        position -= gl.load(metadata.num_prompt + slot, mask=is_row, other=0)
        index = gl.load(metadata.output_index + slot, mask=is_row, other=0)
        numbers = number[:, None] + gl.zeros([BN, BM], gl.int32, layout)
        noise = gumbel(seed[None, :], position[None, :], index[None, :], numbers)
        is_sampled = (temperature > 0.0)[None, :]
        scaled = gl.div_rn(logits, gl.where(temperature > 0.0, temperature, 1.0)[None, :])
        value = gl.where(is_sampled, scaled + noise, logits)
    value = gl.where(value == value, value, -float("inf"))
    best = gl.max(value, 0)
    place = token * (P.N // BN) + program
    gl.store(values + place, best, mask=is_row)
    gl.store(tops + place, top, mask=is_row)
    gl.store(ids + place, gl.min(gl.where(value == best[None, :], number[:, None], 2147483647), 0), mask=is_row)
