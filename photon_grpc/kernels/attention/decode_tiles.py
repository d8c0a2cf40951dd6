"""Tiles of one decode step's attention, for `gluon_decode.py`: a table from sweeps on an H200."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.jit import num_multiprocessors, num_shared_bytes

MAX_SPLITS = 32
#: Bytes of a multiprocessor's shared memory that the driver takes for each program.
RESERVED_BYTES = 1024
# head_dim -> (most (row, key head) pairs, (KW, BN, NS, MIN_SPLIT)). Sweeps with 8 key heads: up to 256 pairs of whole
# decode steps at contexts of 272 to 32,000, above at 272, 2,000 and 64 … 1,500 mixed.
TILES = {
    64: (
        (8, (4, 64, 3, 512)),
        (128, (2, 64, 3, 512)),
        (256, (2, 32, 3, 512)),
        (384, (1, 64, 3, 512)),
        (512, (1, 64, 2, 512)),
        (768, (1, 32, 4, 512)),
        (1024, (1, 32, 3, 512)),
        (math.inf, (1, 64, 2, 512)),
    ),
    128: (
        (16, (2, 32, 6, 288)),
        (64, (2, 32, 3, 160)),
        (256, (2, 32, 3, 288)),
        (512, (1, 32, 3, 96)),
        (math.inf, (2, 32, 2, 96)),
    ),
}


class Limits(NamedTuple):
    """Limits of a device: its multiprocessors, and the bytes of shared memory that one program may have."""

    multiprocessors: int
    shared_bytes: int


class DecodeTile(NamedTuple):
    """Compile-time sizes that follow from the batch.

    HEADS is GROUP padded to 8 or 16. KW warps of BN keys a step, NS steps under way, at most SPLITS splits of at least
    MIN_SPLIT keys.
    """

    HEADS: int
    KW: int
    BN: int
    NS: int
    MIN_SPLIT: int
    SPLITS: int = 1


def limits_of(device: torch.device) -> Limits:
    return Limits(num_multiprocessors(device), num_shared_bytes(device))


def choose(num_pairs: int, group: int, head_dim: int, max_context_len: int, limits: Limits) -> DecodeTile:
    """Choose the tile for `num_pairs` (row, key head) pairs: few want many keys in flight each, many small programs.

    A step has half as many keys where the device has no room for the ring.
    """
    warps, keys, steps, min_split = next(found for most, found in TILES[max(head_dim, 64)] if num_pairs <= most)
    if ring_bytes(warps * keys, steps, head_dim) > limits.shared_bytes:
        keys //= 2
    resident = (limits.shared_bytes + RESERVED_BYTES) // (ring_bytes(warps * keys, steps, head_dim) + RESERVED_BYTES)
    splits = num_splits(num_pairs, max_context_len, resident * limits.multiprocessors, min_split)
    return DecodeTile(8 if group <= 8 else 16, warps, keys, steps, min_split, splits)


def ring_bytes(keys: int, steps: int, head_dim: int) -> int:
    """Return the bytes of 16-bit keys and values in flight in one program."""
    return 4 * keys * steps * head_dim


def num_splits(num_pairs: int, max_context_len: int, num_programs: int, min_split: int) -> int:
    """Return the most splits of each (row, key head) pair: a power of two, at most `num_programs` splits in all."""
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * num_pairs <= num_programs and splits * min_split < max_context_len:
        splits *= 2
    return splits
