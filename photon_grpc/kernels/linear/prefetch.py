"""The beginning of the next product's weight, asked for before memory falls idle.

The last tiles of W are on their way some microseconds before a product ends, and between two products of a chain stands
a kernel that reads little. As soon as a program has asked for its last tile it asks for its share of the next weight,
which the second-level cache then has when the next product begins. These are hints: no result depends on them.

sm_90: one instruction brings a whole chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit

#: Bytes of a weight that the product before it asks for, at most. Of more, the cache of an H200 (50 MB) would lose some
#: before they are read.
MAX_BYTES = 0
#: Bytes of one instruction, at most.
MAX_CHUNK_BYTES = 2048
_MIN_CHUNK_BYTES = 128


class Ahead(NamedTuple):
    """The chunks to ask for: A_ROW of BYTES each at the beginning of every row, of STRIDE elements, CHUNKS in all."""

    CHUNKS: int
    A_ROW: int
    BYTES: int
    STRIDE: int


def ahead(following: torch.Tensor | None) -> Ahead | None:
    """Return the chunks of the next weight [rows, …]; None if there are none to ask for."""
    if following is None or not following.is_contiguous():
        return None
    rows = following.shape[0]
    row_bytes = following.numel() // rows * following.itemsize
    of_row = min(row_bytes, MAX_BYTES // rows)
    if of_row < _MIN_CHUNK_BYTES or row_bytes % 16:
        return None
    chunk = min(MAX_CHUNK_BYTES, 1 << (of_row.bit_length() - 1))
    a_row = of_row // chunk
    return Ahead(rows * a_row, a_row, chunk, row_bytes // following.itemsize)


@constexpr_function
def instruction(num_bytes: int) -> str:
    return f"cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0;"


@gluon_jit
def prefetch(following, program, PROGRAMS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr):
    """Ask for a program's share of the chunks of `following`; without AHEAD (None) for nothing."""
    if AHEAD is not None:
        THREADS: gl.constexpr = 32 * WARPS
        EACH: gl.constexpr = (AHEAD.CHUNKS + PROGRAMS - 1) // PROGRAMS
        WIDTH: gl.constexpr = AHEAD.BYTES * 8 // following.dtype.element_ty.primitive_bitwidth
        ASM: gl.constexpr = instruction(AHEAD.BYTES)
        thread = gl.arange(0, THREADS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        for first in gl.static_range(0, EACH, THREADS):
            # Chunks beyond a program's share are its neighbour's: asked for twice they are brought once.
            chunk = gl.minimum(program * EACH + first + thread, AHEAD.CHUNKS - 1)
            at = following + (chunk // AHEAD.A_ROW * AHEAD.STRIDE + chunk % AHEAD.A_ROW * WIDTH)
            gl.inline_asm_elementwise(ASM, "=r,l", [at], gl.int32, False, 1)
