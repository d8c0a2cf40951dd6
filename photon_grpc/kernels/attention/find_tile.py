"""Search for the row of a program, in a batch whose rows are each cut into tiles."""

from __future__ import annotations

from photon_grpc.kernels.lang.jit import jit, tl


@jit
def find_tile(query_start, num_rows, program, TILE: tl.constexpr):
    """Return row, its first query, its number of queries, and the first of them in tile `program`.

    Usable in Triton and Gluon kernels.

    Row b's tiles of TILE queries begin at query_start[b] // TILE + b, so T // TILE + B programs are enough whatever the
    lengths are, and the row of a program is found by bisection. Some programs have nothing to do: their first query
    comes after the last.
    """
    low, above = 0, num_rows
    while low < above:
        middle = (low + above) // 2
        if tl.load(query_start + middle) // TILE + middle <= program:
            low = middle + 1
        else:
            above = middle
    row = low - 1
    first_query = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_query
    return row, first_query, count, (program - (first_query // TILE + row)) * TILE
