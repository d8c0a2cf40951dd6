"""The cut of K: into how many slices the sum of a product is cut, for ever, however many rows are multiplied.

A slice's sum is one chain of products; the slices' sums are added in float32 in the order of their numbers. Every
kernel and the matrix library give the same bits for the same cut (docs/decisions/0039-one-arithmetic.md).
"""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import constexpr_function

#: Slices begin at multiples of this many columns; the last one may be shorter.
GRAIN = 64
#: The chain of a weight with fewer rows takes longer than reading the weight: it is cut while slices stay this long.
FULL_ROWS, LONG_COLUMNS, MAX_SLICES = 3584, 4096, 4
#: A packed weight is read in half of the time, or a quarter: it is cut while tiles of 64 rows of it do not exceed the
#: multiprocessors of an H200, and slices stay this long.
PACKED_ROWS, PACKED_COLUMNS = 64 * 132, 1024
#: (rows of W, columns of W) -> slices, where measurements are against the rule.
MEASURED = {
    # Llama-3.2-1B: qkv, where one chain costs 3 % of a step at 8 rows.
    (3072, 2048): 2,
}


def num_slices(n: int, k: int, *, is_packed: bool = False) -> int:
    """Return the slices of W [n, k]: a power of two."""
    if is_packed:
        return _num_packed_slices(n, k)
    if (n, k) in MEASURED:
        return MEASURED[n, k]
    slices = 1
    while slices < MAX_SLICES and slices * n < FULL_ROWS and k >= slices * LONG_COLUMNS:
        slices *= 2
    return slices


def _num_packed_slices(n: int, k: int) -> int:
    slices = 1
    while slices < MAX_SLICES and 2 * slices * n <= PACKED_ROWS and k >= 2 * slices * PACKED_COLUMNS:
        slices *= 2
    return slices


@constexpr_function
def slice_columns(k: int, slices: int) -> int:
    """Return the columns of a slice, all but the last."""
    return -(-k // (slices * GRAIN)) * GRAIN
