"""top-k, top-p and min-p as one number per row: the smallest logit that is kept.

Order and meaning are those of transformers' warpers: top-k, then top-p over what is left, then min-p. Tokens whose logits are equal are kept
or dropped together.

    after top-k   v_k, the k-th largest
    after top-p   the smallest v with  Σ exp(x) over x > v  <  top_p · Σ exp(x) over the k largest
    after min-p   max(x) + log(min_p)
    cutoff      = the largest of the three

Nothing is sorted: the kernel searches v_k and v digit by digit over the bits of a float, in the order of their numbers. A digit has four bits
and takes one pass over the row for all sixteen of its values. Sums are taken in a fixed order.

Shapes: scaled logits float32 [R, V], top_k int64 [R] (-1: off), top_p and min_p float32 [R] (1 and 0: off) -> float32 [R].
Bytes moved: 4 · R · V once, and once more for each of eight digits, from the second-level cache while it holds the row.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.jit import jit, launches, tl


def reference(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """cutoff in torch, which sorts."""
    ordered = scaled.sort(dim=-1, descending=True).values
    vocab = ordered.shape[1]
    k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    kept = torch.arange(vocab, device=scaled.device) < k[:, None]
    probabilities = ordered.masked_fill(~kept, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # The likeliest is always kept; with top_p = 1 rounding in the sum must not drop anything.
    kept &= (before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    num_kept = kept.sum(-1).clamp(min=1)
    smallest = ordered.gather(1, (num_kept - 1)[:, None])[:, 0]
    return torch.maximum(smallest, ordered[:, 0] + min_p.log())


@jit
def ordinal(x):
    """uint32 in the order of the floats; zeros of both signs are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def value_of(number):
    """The float of an ordinal."""
    bits = (number ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def cutoff_kernel(scaled, top_k, top_p, min_p, out, num_columns, stride, BLOCK: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    x = scaled + row * stride
    column = tl.arange(0, BLOCK)
    digit = tl.arange(0, 16).to(tl.uint32)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, num_columns, BLOCK):
        highest = tl.maximum(
            highest, tl.load(x + start + column, mask=start + column < num_columns, other=-float("inf"))
        )
    top = tl.max(highest, axis=0)

    k, p = tl.load(top_k + row).to(tl.int32), tl.load(top_p + row)
    # The largest number that k values are not below.
    kth = tl.full([], 0, tl.uint32)
    if (k > 0) & (k < num_columns):
        shift = tl.full([], 32, tl.uint32)
        for _ in range(8):
            shift -= 4
            bounds = kth + (digit << shift)
            counts = tl.zeros([BLOCK, 16], tl.int32)
            for start in range(0, num_columns, BLOCK):
                inside = start + column < num_columns
                number = ordinal(tl.load(x + start + column, mask=inside, other=-float("inf")))
                counts += ((number[:, None] >= bounds[None, :]) & inside[:, None]).to(tl.int32)
            reached = tl.sum((tl.sum(counts, axis=0) >= k).to(tl.int32), axis=0)
            kth += (reached - 1).to(tl.uint32) << shift
    last = kth
    if p < 1.0:
        # What the k largest weigh; of those that equal the k-th, as many as make up k.
        weights, above = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_columns, BLOCK):
            inside = start + column < num_columns
            value = tl.load(x + start + column, mask=inside, other=-float("inf"))
            is_above = inside & (ordinal(value) > kth)
            weights += tl.where(is_above, tl.exp(value - top), 0.0)
            above += is_above.to(tl.int32)
        total = tl.sum(weights, axis=0)
        if kth > 0:
            total += (k - tl.sum(above, axis=0)).to(tl.float32) * tl.exp(value_of(kth) - top)
        # The largest number with too much above it; the next one up is kept.
        short = tl.full([], 0, tl.uint32)
        any_short = 0
        shift = tl.full([], 32, tl.uint32)
        for _ in range(8):
            shift -= 4
            bounds = short + (digit << shift)
            sums = tl.zeros([BLOCK, 16], tl.float32)
            for start in range(0, num_columns, BLOCK):
                inside = start + column < num_columns
                value = tl.load(x + start + column, mask=inside, other=-float("inf"))
                number = ordinal(value)
                weight = tl.where(inside & (number > kth), tl.exp(value - top), 0.0)
                sums += tl.where(number[:, None] > bounds[None, :], weight[:, None], 0.0)
            enough = (tl.sum(sums, axis=0) >= p * total).to(tl.int32)
            reached = tl.sum(enough, axis=0)
            any_short = tl.maximum(any_short, reached)
            short += tl.maximum(reached - 1, 0).to(tl.uint32) << shift
        if any_short > 0:
            last = tl.maximum(last, short + 1)
    smallest = tl.where(last > 0, value_of(last), -float("inf"))
    least = top + tl.log(tl.load(min_p + row))
    # The likeliest is always kept.
    tl.store(out + row, tl.minimum(tl.maximum(smallest, least), top))


def config() -> dict[str, Any]:
    """Compile-time arguments."""
    return {"BLOCK": 1024, "num_warps": 16}


def launch(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32 [R]; see `reference`. Rows of `scaled` may be strided, columns not."""
    if not launches(scaled):
        return reference(scaled, top_k, top_p, min_p)
    num_rows, num_columns = scaled.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=scaled.device)
    if num_rows:
        cutoff_kernel[(num_rows,)](scaled, top_k, top_p, min_p, out, num_columns, scaled.stride(0), **config())
    return out
