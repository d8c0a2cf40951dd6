"""Tiles of one decode step's attention, for `gluon_decode.py`: a table for an H200; no bit depends on it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from photon_grpc.kernels.attention.key_order import ORDERS, num_lanes
from photon_grpc.kernels.lang.jit import num_multiprocessors, num_shared_bytes

#: Bytes of a multiprocessor's shared memory that the driver takes for each program.
RESERVED_BYTES = 1024
#: Bytes that a program needs beside its ring: the scores that its warps exchange.
SCRATCH_BYTES = 8192
# head_dim -> (most (row, key head) pairs, (KW, NS)).
TILES = {
    64: ((8, (4, 3)), (256, (2, 3)), (1024, (2, 2)), (math.inf, (2, 1))),
    128: ((256, (4, 4)), (512, (4, 3)), (math.inf, (2, 2))),
}


class Limits(NamedTuple):
    """Limits of a device: its multiprocessors, and the bytes of shared memory that one program may have."""

    multiprocessors: int
    shared_bytes: int


class DecodeTile(NamedTuple):
    """Constants that the kernel is compiled for.

    HEADS is GROUP padded to 8 or 16, UPDATE and LANE those of the key order. KW warps, NS updates under way. SHARED:
    whether programs may share a row.
    """

    HEADS: int
    UPDATE: int
    LANE: int
    KW: int
    NS: int
    SHARED: bool = False


def limits_of(device: torch.device) -> Limits:
    return Limits(num_multiprocessors(device), num_shared_bytes(device))


def choose(
    num_pairs: int, group: int, head_dim: int, max_context_len: int, limits: Limits
) -> tuple[DecodeTile, int]:  # fmt: skip
    """Choose the tile, and the most programs a pair, for `num_pairs` (row, key head) pairs.

    Few pairs want many keys under way each, many pairs small programs. A ring is shorter where the device has no room.
    """
    update, lane = ORDERS[head_dim]
    warps, steps = next(found for most, found in TILES[max(head_dim, 64)] if num_pairs <= most)
    # The scores of 16 heads take twice the registers.
    warps = 4 if group > 8 else warps
    room = limits.shared_bytes - SCRATCH_BYTES
    steps = max(1, min(steps, room // ring_bytes(update, 1, head_dim)))
    resident = (limits.shared_bytes + RESERVED_BYTES) // (ring_bytes(update, steps, head_dim) + RESERVED_BYTES)
    splits = max(1, min(resident * limits.multiprocessors // num_pairs, num_lanes(max_context_len, lane)))
    return DecodeTile(8 if group <= 8 else 16, update, lane, warps, steps, splits > 1), splits


def ring_bytes(keys: int, steps: int, head_dim: int) -> int:
    """Return the bytes of 16-bit keys and values in flight in one program."""
    return 4 * keys * steps * head_dim
