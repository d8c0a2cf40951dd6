"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (SC 2011), on the host and on the device.

Ten rounds of two 32 x 32 -> 64 bit products over a counter of four 32-bit words, keyed by two words.
"""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.jit import jit, tl

MULTIPLIER_A = 0xD2511F53
MULTIPLIER_B = 0xCD9E8D57
WEYL_A = 0x9E3779B9
WEYL_B = 0xBB67AE85
MASK = 0xFFFFFFFF


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, rounds: int = 10) -> tuple[Any, Any, Any, Any]:
    """Four words from a counter and a key, all 32-bit words in 64-bit integers, of shapes that broadcast.

    Takes NumPy uint64 arrays or torch int64 tensors alike: a product wraps to the same 64 bits signed or unsigned, and
    the mask behind every shift drops the sign bits that a signed shift brings in.
    """
    for _ in range(rounds):
        product_a, product_b = c0 * MULTIPLIER_A, c2 * MULTIPLIER_B
        c0 = ((product_b >> 32) ^ c1 ^ k0) & MASK
        c2 = ((product_a >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = product_b & MASK, product_a & MASK
        k0, k1 = (k0 + WEYL_A) & MASK, (k1 + WEYL_B) & MASK
    return c0, c1, c2, c3


@jit
def philox_word(c0, c1, c2, c3, seed):
    """Word 0, uint32, of the counter's words (any 32-bit integers that broadcast) under a 64-bit seed = key (lo, hi)."""
    key = seed.to(tl.uint64, bitcast=True)
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox_impl(c0, c1, c2, c3, low, high)
    return word
