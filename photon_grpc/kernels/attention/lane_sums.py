"""The steps of `key_order.py` in Gluon, for tensors whose first axis is queries and whose last is keys or classes."""

from __future__ import annotations

from photon_grpc.kernels.attention.key_order import CLASSES
from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit


@constexpr_function
def num_classes() -> int:
    """Return CLASSES, as kernels may read it."""
    return CLASSES


@constexpr_function
def num_halvings(columns: int, left: int) -> int:
    """Return how often `columns` are halved until `left` are left."""
    return (columns // left).bit_length() - 1


@gluon_jit
def class_sums(p):
    """Return [M, 8]: the sums of p [M, keys] over the keys of each class, a tree by halves."""
    for _ in gl.static_range(num_halvings(p.shape[1], num_classes())):
        low, high = gl.split(gl.permute(gl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), [0, 2, 1]))
        p = low + high
    return p


@gluon_jit
def sum_of_classes(total, WARPS: gl.constexpr):
    """Return [M]: the sum of total [M, classes], a tree of neighbours."""
    total = gl.convert_layout(total, gl.BlockedLayout([1, total.shape[1]], [32, 1], [WARPS, 1], [1, 0]))
    for _ in gl.static_range(num_halvings(total.shape[1], 2)):
        even, odd = gl.split(gl.reshape(total, [total.shape[0], total.shape[1] // 2, 2]))
        total = even + odd
    even, odd = gl.split(total)
    return even + odd


@gluon_jit
def of_rows(x, like):
    """Return x [M] as a column that multiplies `like` [M, N]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon_jit
def update(scores, high, total, scale, MASKED: gl.constexpr):
    """Return the weights [M, keys] of one update, the factor [M] of earlier sums, the new high [M] and total [M, 8].

    With MASKED a score may be -inf, and so may all of them.
    """
    top = gl.maximum(high, gl.max(scores, 1) * scale)
    base = top
    if MASKED:
        base = gl.where(top == -float("inf"), 0.0, top)
    p = gl.exp2(gl.fma(scores, scale, -base[:, None]))
    shrink = gl.exp2(high - base)
    return p, shrink, top, gl.fma(total, of_rows(shrink, total), class_sums(p))


@gluon_jit
def fold_weights(high, lane_high):
    """Return the new high [M] of the lanes folded so far and one more, the factor of those sums and that of its own."""
    top = gl.maximum(high, lane_high)
    base = gl.where(top == -float("inf"), 0.0, top)
    return top, gl.exp2(high - base), gl.exp2(lane_high - base)


@gluon_jit
def fold(kept, lane, kept_factor, lane_factor):
    """Return the sums `kept` [M, N] with those of one more lane; factors are columns."""
    return gl.fma(kept, kept_factor, lane * lane_factor)
