"""The cut of K: into how many slices the sum of a product is cut, for ever, however many rows are multiplied.

A slice's sum is one chain of products; the slices' sums are added in float32 in the order of their numbers. Every
kernel and the matrix library give the same bits for the same cut (docs/decisions/0039-one-arithmetic.md).
"""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import constexpr_function

#: Slices begin at multiples of this many columns; the last one may be shorter.
GRAIN = 64
MAX_SLICES = 4
#: A weight is cut in two while it has at most so many rows, counted once a slice, and at least so many columns, for the
#: first cut and for the second. The chain of one with fewer rows takes longer than reading it.
PLAIN_LIMITS = 3583, (4096, 8192)
#: The same for packed weights, by their bits. One of 8 is read in half of the time: tiles of 64 rows of both halves do
#: not exceed the multiprocessors of an H200. One of 4 is read in a quarter, and chains of few rows take longer still.
PACKED_LIMITS = {8: (32 * 132, (2048, 4096)), 4: (80 * 132, (2048, 8192))}
#: (rows of W, columns of W) -> slices, where measurements are against the rule.
MEASURED = {
    # Llama-3.2-1B: qkv, where one chain costs 3 % of a step at 8 rows.
    (3072, 2048): 2,
}


def num_slices(n: int, k: int, *, bits: int = 16) -> int:
    """Return the slices of W [n, k], packed in so many bits: a power of two."""
    if bits == 16 and (n, k) in MEASURED:
        return MEASURED[n, k]
    most_rows, least_columns = PACKED_LIMITS.get(bits, PLAIN_LIMITS)
    slices = 1
    while slices < MAX_SLICES and slices * n <= most_rows and k >= least_columns[slices // 2]:
        slices *= 2
    return slices


@constexpr_function
def slice_columns(k: int, slices: int) -> int:
    """Return the columns of a slice, all but the last."""
    return -(-k // (slices * GRAIN)) * GRAIN
