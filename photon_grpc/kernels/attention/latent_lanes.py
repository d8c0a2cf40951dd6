"""Kernel of attention over latents: lanes of keys, of which each is added on its own (`latent.py` has the formula).

A program has HEADS of one token: a lane of its keys (where rows are short), or all of them. Both add alike: STEP keys
at a time in a lane of LANE, lanes in their order.
"""

from __future__ import annotations

from typing import NamedTuple

from photon_grpc.kernels.lang.gluon import gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import jit, tl


class LatentTile(NamedTuple):
    """The constants of a kernel: heads, numbers of a latent, rotated ones, those of blocks; the cut of a program.

    ROWS_PAD: of the rows of a step. TOKENS: of a program of `latent_ring.py`.
    """

    NUM_HEADS: int
    RANK: int
    ROTATED: int
    RANK_PAD: int
    ROTATED_PAD: int
    BLOCK_SIZE: int
    ROWS_PAD: int
    LANE: int
    STEP: int
    HEADS: int
    TOKENS: int
    PRECISION: str = "ieee"


@jit
def merged(state, lane):
    """Return the state with a later lane in it: largest score, sum of powers, their sum times values."""
    most, total, acc = state
    lane_most, lane_total, lane_acc = lane
    largest = tl.maximum(most, lane_most)
    before, now = tl.exp2(most - largest), tl.exp2(lane_most - largest)
    total = tl.fma(lane_total, now, total * before)
    return largest, total, tl.fma(lane_acc, now[:, None] + tl.zeros_like(lane_acc), acc * before[:, None])


@jit
def lane_sums(q_plain, q_rotated, pages, table, begin, end, scale, block_stride, C: tl.constexpr):
    """Return largest score [HEADS], sum of powers [HEADS], that of values [HEADS, RANK_PAD] of the keys of a lane."""
    HEADS: tl.constexpr = C.HEADS
    RANK_PAD: tl.constexpr = C.RANK_PAD
    STEP: tl.constexpr = C.STEP
    most = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, RANK_PAD], tl.float32)
    plain, rotated = tl.arange(0, C.RANK_PAD), tl.arange(0, C.ROTATED_PAD)
    for first in range(begin, end, C.STEP):
        key = first + tl.arange(0, C.STEP)
        there = key < end
        if C.BLOCK_SIZE % C.STEP == 0:
            # One block has all keys of a step.
            block = tl.load(table + first // C.BLOCK_SIZE).to(tl.int64)
            in_block = (first % C.BLOCK_SIZE + tl.arange(0, STEP)) * (C.RANK + C.ROTATED)
            at = pages + block * block_stride + in_block
        else:
            blocks = tl.load(table + key // C.BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            at = pages + blocks * block_stride + key % C.BLOCK_SIZE * (C.RANK + C.ROTATED)
        c = tl.load(at[:, None] + plain[None, :], mask=there[:, None] & (plain < C.RANK)[None, :], other=0.0)
        r_at, r_in = at[:, None] + C.RANK + rotated[None, :], there[:, None] & (rotated < C.ROTATED)[None, :]
        r = tl.load(r_at, mask=r_in, other=0.0)
        s = tl.dot(q_plain, tl.trans(c), input_precision=C.PRECISION)
        s = tl.dot(q_rotated, tl.trans(r), s, input_precision=C.PRECISION) * scale
        s = tl.where(there[None, :], s, -float("inf"))
        largest = tl.maximum(most, tl.max(s, 1))
        before, p = tl.exp2(most - largest), tl.exp2(s - largest[:, None])
        total = tl.fma(total, before, tl.sum(p, 1))
        acc = tl.dot(p.to(c.dtype), c, acc * before[:, None], input_precision=C.PRECISION)
        most = largest
    return most, total, acc


@jit
def row_of(query_start, num_rows, ROWS_PAD: tl.constexpr, token):
    """Return the row of a token; num_rows if it has none."""
    number = tl.arange(0, ROWS_PAD)
    ends = tl.load(query_start + 1 + number, mask=number < num_rows, other=2147483647)
    return tl.sum((ends <= token).to(tl.int32), 0)


@jit
def latent_kernel(
    q, pages, out, parts, query_start, context_len, tables, num_rows, scale, block_stride, table_stride,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend for HEADS heads of one token per program; with `parts` for one lane of its keys.

    parts: LaneParts, which `latent_values.py` merges; None: all lanes.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    row = row_of(query_start, num_rows, C.ROWS_PAD, token)
    if parts is not None:  # noqa: SIM102
        if row >= num_rows:
            tl.store(parts[3] + token, 0)
    if row < num_rows:
        context = tl.load(context_len + row) - tl.load(query_start + row + 1) + token + 1
        head = tl.program_id(1) * C.HEADS + tl.arange(0, C.HEADS)
        plain, rotated = tl.arange(0, C.RANK_PAD), tl.arange(0, C.ROTATED_PAD)
        pair = token.to(tl.int64) * C.NUM_HEADS + head
        of_q, there = q + pair[:, None] * (C.RANK + C.ROTATED), (head < C.NUM_HEADS)[:, None]
        q_plain = tl.load(of_q + plain[None, :], mask=there & (plain < C.RANK)[None, :], other=0.0)
        q_rotated = tl.load(of_q + C.RANK + rotated[None, :], mask=there & (rotated < C.ROTATED)[None, :], other=0.0)
        table = tables + row.to(tl.int64) * table_stride
        inside = there & (plain < C.RANK)[None, :]
        if parts is None:
            end = tl.minimum(context, C.LANE)
            most, total, acc = lane_sums(q_plain, q_rotated, pages, table, 0, end, scale, block_stride, C)
            for begin in range(C.LANE, context, C.LANE):
                end = tl.minimum(context, begin + C.LANE)
                lane = lane_sums(q_plain, q_rotated, pages, table, begin, end, scale, block_stride, C)
                most, total, acc = merged((most, total, acc), lane)
            to = out + pair[:, None] * C.RANK + plain[None, :]
            tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            number, num_lanes = tl.program_id(2), tl.num_programs(2)
            begin = number * C.LANE
            if number == 0:
                tl.store(parts[3] + token, (context + C.LANE - 1) // C.LANE)
            if begin < context:
                end = tl.minimum(context, begin + C.LANE)
                most, total, acc = lane_sums(q_plain, q_rotated, pages, table, begin, end, scale, block_stride, C)
                place = pair * num_lanes + number
                tl.store(parts[0] + place, most, mask=head < C.NUM_HEADS)
                tl.store(parts[1] + place, total, mask=head < C.NUM_HEADS)
                tl.store(parts[2] + place[:, None] * C.RANK + plain[None, :], acc, mask=inside)
