"""The join of the partial results of one (row, key head), one for each split of its keys, for `gluon_decode.py`."""

from __future__ import annotations

from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit

#: Numbers of the results that a thread holds at a time.
NUMBERS_A_THREAD = 64


@constexpr_function
def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number` (>= 1)."""
    return 1 << (number - 1).bit_length()


@constexpr_function
def splits_at_once(splits: int, heads: int, head_dim: int, warps: int) -> int:
    """Return how many results are loaded together: all of them where a thread has registers for its part."""
    of_a_thread = max(1, heads // warps) * head_dim // 32
    return min(power_of_two(splits), NUMBERS_A_THREAD // of_a_thread)


@constexpr_function
def split_layout(splits: int, head_dim: int, warps: int):
    """Return the layout of [splits, heads, D]: a thread has its part of every split, so threads exchange nothing."""
    return gl.BlockedLayout([splits, 1, head_dim // 32], [1, 1, 32], [1, warps, 1], [2, 1, 0])


@gluon_jit
def combine_splits(
    partial, partial_weight, out, head, num_splits,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Write out [heads, D] of the GROUP heads from `head` on.

    partial [heads, SPLITS, D] holds the results of the splits and partial_weight [heads, SPLITS] their log2 weights.

    Splits are added in the order of their numbers.
    """
    HEADS: gl.constexpr = power_of_two(GROUP)
    AT_ONCE: gl.constexpr = splits_at_once(SPLITS, HEADS, HEAD_DIM, WARPS)
    layout: gl.constexpr = split_layout(AT_ONCE, HEAD_DIM, WARPS)
    joined: gl.constexpr = gl.SliceLayout(0, layout)
    member = gl.arange(0, HEADS, layout=gl.SliceLayout(1, joined))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, joined))
    high = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, joined))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, joined))
    acc = gl.zeros([HEADS, HEAD_DIM], gl.float32, joined)
    for first in range(0, num_splits, AT_ONCE):
        weight, part = load_splits(
            partial, partial_weight, head, first, num_splits, GROUP, HEADS, HEAD_DIM, SPLITS, AT_ONCE, layout
        )  # fmt: skip
        high, total, acc = fold(high, total, acc, weight, part)
    # Heads that pad the group have no weight.
    answer = acc / gl.where(member < GROUP, total, 1.0)[:, None]
    to = out + (head + member)[:, None] * HEAD_DIM + column[None, :]
    gl.store(to, answer.to(out.dtype.element_ty), mask=(member < GROUP)[:, None] & (column >= 0)[None, :])


@gluon_jit
def load_splits(
    partial, partial_weight, head, first, num_splits,
    GROUP: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, SPLITS: gl.constexpr, AT_ONCE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Load weights [AT_ONCE, HEADS] and results [AT_ONCE, HEADS, D] from split `first` on, past the L1 cache.

    A missing split has weight -inf and result 0; heads that pad the group have weight 0.
    """
    of_split: gl.constexpr = gl.SliceLayout(2, layout)
    split = first + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, of_split))[:, None]
    member = gl.arange(0, HEADS, layout=gl.SliceLayout(0, of_split))[None, :]
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    there = (split < num_splits) & (member < GROUP)
    at = (head + member) * SPLITS + split
    weight = gl.load(partial_weight + at, mask=there, other=0.0, cache_modifier=".cg")
    to = partial + at[:, :, None] * HEAD_DIM + column
    part = gl.load(to, mask=there[:, :, None] & (column >= 0), other=0.0, cache_modifier=".cg")
    return gl.where(split < num_splits, weight, -float("inf")), part


@gluon_jit
def fold(high, total, acc, weight, part):
    """Add more splits to the running maximum [HEADS], total [HEADS] and result [HEADS, D]."""
    of_head: gl.constexpr = high.type.layout
    top = gl.maximum(high, gl.convert_layout(gl.max(weight, 0), of_head))
    shrink = gl.exp2(high - top)
    top_of_split = gl.convert_layout(top, gl.SliceLayout(0, weight.type.layout))
    factor = gl.exp2(weight - top_of_split[None, :])
    total = total * shrink + gl.convert_layout(gl.sum(factor, 0), of_head)
    return top, total, acc * shrink[:, None] + gl.sum(part * factor[:, :, None], 0)
