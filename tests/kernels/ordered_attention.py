"""Attention of one query in the order of `photon_grpc/kernels/attention/key_order.py`, in torch."""

from __future__ import annotations

import torch

from photon_grpc.kernels.attention.key_order import CLASSES, KeyOrder, num_lanes

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return a · b + c of float32, rounded once: the product has room in float64."""
    return (a.double() * b.double() + c.double()).float()


def halves(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return [M, columns]: the halves of x [M, N] added until so many are left."""
    while x.shape[1] > columns:
        x = x[:, : x.shape[1] // 2] + x[:, x.shape[1] // 2 :]
    return x


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """Return [M, 1]: neighbours of x [M, N] added until one is left."""
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    return x


def base_of(top: torch.Tensor) -> torch.Tensor:
    return top.where(top != -torch.inf, 0.0)


def empty(heads: int, head_dim: int) -> Sums:
    """Return high [heads, 1], total [heads, CLASSES] and acc [heads, D] before the first key."""
    return torch.full((heads, 1), -torch.inf), torch.zeros(heads, CLASSES), torch.zeros(heads, head_dim)


def update(sums: Sums, scores: torch.Tensor, values: torch.Tensor, scale: float) -> Sums:
    """Add one update: scores [heads, UPDATE], -inf where a key is not visible, and values [UPDATE, D]."""
    high, total, acc = sums
    factor = torch.tensor(scale, dtype=torch.float32)
    top = torch.maximum(high, scores.amax(1, keepdim=True) * factor)
    p = torch.exp2(fma(scores, factor, -base_of(top)))
    shrink = torch.exp2(high - base_of(top))
    acc = acc * shrink
    for first in range(0, p.shape[1], 16):
        group = slice(first, first + 16)
        # A tensor core adds 16 products and the accumulator in one sum.
        acc = (p[:, group].to(values.dtype).double() @ values[group].double() + acc.double()).float()
    return top, fma(total, shrink, halves(p, CLASSES)), acc


def fold(sums: Sums, lane: Sums) -> Sums:
    """Add the sums of one more lane."""
    high, total, acc = sums
    top = torch.maximum(high, lane[0])
    ours, theirs = torch.exp2(high - base_of(top)), torch.exp2(lane[0] - base_of(top))
    return top, fma(total, ours, lane[1] * theirs), fma(acc, ours, lane[2] * theirs)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, order: KeyOrder, padded: int = 0
) -> torch.Tensor:
    """Return [heads, D] for q [heads, D], keys and values [N, D]; `scale` includes log2(e).

    padded: updates after the last key, in which the query sees none.
    """
    num_keys, head_dim = keys.shape
    span = -(-num_keys // order.UPDATE) + padded
    keys, values = (torch.nn.functional.pad(x, (0, 0, 0, span * order.UPDATE - num_keys)) for x in (keys, values))
    # The sums of 16 products of a tensor core are those of float64 up to rounding.
    scores = (q.double() @ keys.double().T).float()
    scores[:, num_keys:] = -torch.inf
    folded, updates = empty(q.shape[0], head_dim), order.LANE // order.UPDATE
    for lane in range(num_lanes(span * order.UPDATE, order.LANE)):
        sums = empty(q.shape[0], head_dim)
        for number in range(lane * updates, min((lane + 1) * updates, span)):
            of_update = slice(number * order.UPDATE, (number + 1) * order.UPDATE)
            sums = update(sums, scores[:, of_update], values[of_update], scale)
        folded = fold(folded, sums)
    return (folded[2] / neighbours(folded[1])).to(q.dtype)
