"""Tiles of one decode step's attention, for `gluon_decode.py`: a table for an H200; no bit depends on it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.decode_columns import programs_and_pairs
from photon_grpc.kernels.attention.decode_ring import PageShape
from photon_grpc.kernels.attention.key_order import ORDERS, num_lanes
from photon_grpc.kernels.lang.jit import num_multiprocessors, num_shared_bytes

#: Bytes of a multiprocessor's shared memory that the driver takes for each program.
RESERVED_BYTES = 1024
#: Bytes that a program needs beside its ring: the scores that its warps exchange.
SCRATCH_BYTES = 8192
# head_dim -> (most programs that share no keys, (KW, NS)).
TILES = {
    64: ((8, (4, 3)), (256, (2, 3)), (512, (4, 1)), (1024, (2, 2)), (math.inf, (2, 1))),
    128: ((256, (4, 4)), (512, (4, 1)), (math.inf, (2, 2))),
    256: ((132, (4, 2)), (math.inf, (4, 1))),
}
#: The same of pages of 8 bits, whose updates have half the bytes. Two programs a multiprocessor have long rings.
TILES_OF_8_BITS = {
    64: ((8, (4, 3)), (128, (2, 3)), (256, (2, 6)), (512, (4, 1)), (1024, (2, 2)), (math.inf, (2, 1))),
    128: ((64, (4, 3)), (132, (4, 4)), (264, (4, 6)), (512, (4, 3)), (math.inf, (2, 2))),
    256: ((64, (4, 2)), (256, (4, 3)), (math.inf, (4, 1))),
}


class Limits(NamedTuple):
    """Limits of a device: its multiprocessors, and the bytes of shared memory that one program may have."""

    multiprocessors: int
    shared_bytes: int


class DecodeTile(NamedTuple):
    """Constants that the kernel is compiled for.

    COLUMNS are the (query, head) pairs of a program padded to 8 or 16, UPDATE and LANE those of the key order. KW
    warps, NS updates under way. SHARED: whether programs may share a row.
    """

    COLUMNS: int
    UPDATE: int
    LANE: int
    KW: int
    NS: int
    SHARED: bool = False


def limits_of(device: torch.device) -> Limits:
    return Limits(num_multiprocessors(device), num_shared_bytes(device))


def lanes_in_sight(max_context_len: int, shape: PageShape, lane: int) -> int:
    """Return the most lanes that the queries of one row see keys of."""
    in_window = num_lanes(shape.WINDOW + shape.QUERIES - 1, lane) + 1 if shape.WINDOW else max_context_len
    return min(in_window, num_lanes(max_context_len, lane))


def divided(shape: PageShape, num_rows: int, limits: Limits) -> PageShape:
    """Return the shape with 8 pairs a program if a multiprocessor is left for each: 16 take a program longer."""
    narrow = shape._replace(PAIRS=8)
    num_programs = num_rows * shape.KV_HEADS * programs_and_pairs(narrow)[0]
    return narrow if shape.QUERIES > 1 and num_programs <= limits.multiprocessors else shape


def choose(num_programs: int, shape: PageShape, max_context_len: int, limits: Limits) -> tuple[DecodeTile, int]:
    """Choose the tile, and the most programs that share one's keys, for so many (row, key head, queries) programs.

    Few programs want many keys under way each, many want to be small. A ring is shorter where the device has no room.
    """
    head_dim, (_, pairs) = shape.HEAD_DIM, programs_and_pairs(shape)
    update, lane = ORDERS[head_dim]
    table = TILES if shape.CHUNK == 8 else TILES_OF_8_BITS
    warps, steps = next(found for most, found in table[max(head_dim, 64)] if num_programs <= most)
    # The scores of 16 columns take twice the registers.
    warps = 4 if pairs > 8 else warps
    room = limits.shared_bytes - SCRATCH_BYTES
    steps = max(1, min(steps, room // ring_bytes(update, 1, shape)))
    resident = (limits.shared_bytes + RESERVED_BYTES) // (ring_bytes(update, steps, shape) + RESERVED_BYTES)
    lanes = lanes_in_sight(max_context_len, shape, lane)
    splits = max(1, min(resident * limits.multiprocessors // num_programs, lanes))
    return DecodeTile(8 if pairs <= 8 else 16, update, lane, warps, steps, splits > 1), splits


def ring_bytes(keys: int, steps: int, shape: PageShape) -> int:
    """Return the bytes of keys and values in flight in one program."""
    return 32 // shape.CHUNK * keys * steps * shape.HEAD_DIM
