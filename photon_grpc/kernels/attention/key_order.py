"""The order in which a query's keys are summed: the same in every attention kernel, in any company and by any path.

Update u of a softmax covers the keys at the absolute positions u · UPDATE … (u + 1) · UPDATE - 1, lane l those from
l · LANE on. For one query:

    a lane begins with     high = -inf, total[8] = 0, acc[D] = 0
    an update computes     top = max(high, max(s) · scale) over the scores of visible keys; `scale` includes log2(e)
                           base = 0 if top is -inf, else top
                           p = exp2(fma(s, scale, -base)), 0 where a key is not visible
                           shrink = exp2(high - base)
                           total[c] = fma(total[c], shrink, sum of p[c :: 8], a tree by halves)
                           acc = acc · shrink + p V, p rounded to 16 bits, in steps of 16 keys
                           high = top
    lanes are folded       in their order, from H = -inf, T[8] = 0, A[D] = 0, the first and only one too:
                           top = max(H, high), base as above, a = exp2(H - base), b = exp2(high - base)
                           T = fma(T, a, total · b), A = fma(A, a, acc · b), H = top
    the answer is          A / (((T0 + T1) + (T2 + T3)) + ((T4 + T5) + (T6 + T7)))

An update or a lane in which a query sees no key changes nothing, so a kernel may compute it. Programs that share a row
take whole lanes. `tests/kernels/ordered_attention.py` is this order in torch.
"""

from __future__ import annotations

from typing import NamedTuple

#: Sums of weights that a query keeps: key k belongs to class k % CLASSES.
CLASSES = 8


class KeyOrder(NamedTuple):
    """Keys of one softmax update, and of one lane, a multiple of it."""

    UPDATE: int
    LANE: int


#: head_dim -> order, for the kernels of 16 bits that share it. A change changes bits: raise the numerics version.
ORDERS = {
    32: KeyOrder(128, 1024),
    64: KeyOrder(128, 1024),
    128: KeyOrder(64, 1024),
    256: KeyOrder(64, 256),
}


def plain_order(head_dim: int, itemsize: int) -> KeyOrder:
    """Return the order of the kernels in plain Triton, which serve what the others do not.

    Their tiles of keys live in registers: without tensor cores, or with wide heads, larger ones spill them. Lanes are
    short, since a row is shared by as many programs as it has lanes.
    """
    if itemsize == 4:
        return KeyOrder(32 if head_dim <= 64 else 16, 256)
    return KeyOrder(64 if head_dim <= 128 else 32, 256)


def num_lanes(num_keys: int, lane: int) -> int:
    """Return the lanes of a row of `num_keys` keys."""
    return -(-num_keys // lane)
