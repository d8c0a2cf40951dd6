"""top-k, top-p and min-p as one number per row: the smallest logit that is kept.

Order and meaning are those of transformers' warpers: top-k, then top-p over what is left, then min-p. Tokens whose logits are equal are kept
or dropped together.

    after top-k   v_k, the k-th largest
    after top-p   the largest v with  Σ exp(x) over x >= v  not below  top_p · Σ exp(x) over the k largest
    after min-p   max(x) + log(min_p)
    threshold   = the largest of the three

Nothing is sorted. Passes over the rows list the few elements among which v_k or v is (`histogram.py`); then one program
a row halves the interval of floats, in the order of their numbers, until one is left. Where there are too many to list
(flat rows, a large k) it does so over the row itself: right, and slower. Sums are taken in a fixed order.

Shapes: scaled logits float32 [R, V], top_k int64 [R] (-1: off), top_p and min_p float32 [R] (1 and 0: off) -> float32 [R].
Bytes moved: 4 · R · V three times, four where a nucleus is wide, once for min-p alone; nothing for rows that filter nothing.
Scratch: CAPACITY + TILE floats a row.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.sampling.histogram import (
    bin_of,
    criteria,
    list_kernel,
    peak_kernel,
    peak_of,
    places_of,
    tally_kernel,
    window_kernel,
)


def reference(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """topk_topp in torch, which sorts."""
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
def mass_of(value, bound, top, BY_COUNT: tl.constexpr):
    """How many of a tile's elements are not below `bound`, or what they weigh."""
    return tl.sum(tl.where(value >= bound, 1.0 if BY_COUNT else tl.exp(value - top), 0.0), axis=0)


@jit
def load(source, start, count, SIZE: tl.constexpr):
    """A tile of `source`; behind its end what no comparison holds for."""
    column = start + tl.arange(0, SIZE)
    return tl.load(source + column, mask=column < count, other=float("nan"))


@jit
def mass_from(source, count, bound, top, BY_COUNT: tl.constexpr, STEP: tl.constexpr):
    """`mass_of` the `count` elements at `source`."""
    mass = tl.full([], 0.0, tl.float32)
    for start in range(0, count, STEP):
        mass += mass_of(load(source, start, count, STEP), bound, top, BY_COUNT)
    return mass


@jit
def narrow(
    source, count, top, before, target, low, high, BY_COUNT: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    """Halve low..high until it has at most TILE elements: the new low and high, and the mass above high with `before`."""
    not_below, above, mass_above = count.to(tl.float32), tl.full([], 0.0, tl.float32), before
    while (low < high) & (not_below - above > TILE):
        middle = high - ((high - low) >> 1)
        bound = value_of(middle)
        number, mass = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        for start in range(0, count, STEP):
            value = load(source, start, count, STEP)
            number += mass_of(value, bound, top, True)
            mass += mass_of(value, bound, top, BY_COUNT)
        mass += before
        if mass >= target:
            low, not_below = middle, number
        else:
            high, above, mass_above = middle - 1, number, mass
    return low, high, mass_above


@jit
def gather(source, count, low, high, scratch, TILE: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr):
    """The elements of low..high, TILE of them at most, as a tile; by way of `scratch` [TILE]."""
    place = 0
    for start in range(0, count, STEP):
        value = load(source, start, count, STEP)
        bits = ordinal(value)
        chosen = ((bits >= low) & (bits <= high) & (value == value)).to(tl.int32)
        position = place + places_of(chosen, LANES)
        tl.store(scratch + position, value, mask=(chosen > 0) & (position < TILE))
        place += tl.sum(chosen, axis=0)
    tl.debug_barrier()
    return load(scratch, 0, tl.minimum(place, TILE), TILE)


@jit
def find(
    tile,
    source,
    count,
    scratch,
    top,
    before,
    target,
    low,
    high,
    BY_COUNT: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    """The largest ordinal in low..high from which on the elements, with the mass `before` them, reach `target`; low does.

    `tile` has all `count` elements at `source`, if it can.
    """
    if count > TILE:
        low, high, before = narrow(source, count, top, before, target, low, high, BY_COUNT, TILE, STEP)
        tile = gather(source, count, low, high, scratch, TILE, STEP, LANES)
    while low < high:
        middle = high - ((high - low) >> 1)
        if before + mass_of(tile, value_of(middle), top, BY_COUNT) >= target:
            low = middle
        else:
            high = middle - 1
    return low


@jit
def range_of(value, top, first, last):
    """The least and the largest ordinal of a tile's elements in the bins first..last."""
    number, bits = bin_of(value, top), ordinal(value)
    within = (number >= first) & (number <= last) & (value == value)
    return tl.min(tl.where(within, bits, 0xFFFFFFFF), axis=0), tl.max(tl.where(within, bits, 0), axis=0)


@jit
def cutoff_kernel(
    scaled,
    top_k,
    top_p,
    min_p,
    peaks,
    windows,
    listed,
    list_stride,
    out,
    num_splits,
    num_columns,
    stride,
    SPLITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row: the element of the window that the row is searched for, and min-p."""
    row = tl.program_id(0).to(tl.int64)
    k, p, by_count, is_searched = criteria(top_k, top_p, row, num_columns)
    least = tl.log(tl.load(min_p + row))
    threshold = tl.full([], -float("inf"), tl.float32)
    if is_searched | (least > threshold):
        top = peak_of(peaks, row, num_splits, SPLITS)
        threshold = top + least
        if is_searched:
            entry = windows + row * 5
            first, last = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
            before, target, count = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4).to(tl.int32)
            source = listed + row * list_stride
            scratch = source + CAPACITY
            before = tl.where(by_count | (count > CAPACITY), 0.0, before)
            if count > CAPACITY:
                count, source = num_columns, scaled + row * stride
            tile = load(source, 0, count, TILE)
            low, high = range_of(tile, top, first, last)
            for start in range(TILE, count, STEP):
                lower, higher = range_of(load(source, start, count, STEP), top, first, last)
                low, high = tl.minimum(low, lower), tl.maximum(high, higher)
            # Sums of bins and of sixteenths round differently: the bin that has the crossing may be empty.
            low = tl.where(low <= high, low, ordinal(top + 0.0625 - first.to(tl.float32) * 0.125))
            if by_count:
                low = find(tile, source, count, scratch, top, before, target, low, high, True, TILE, STEP, LANES)
                # What the k largest weigh; of those that equal the k-th, as many as make up k.
                above = value_of(low + 1)
                others, weight = k - mass_of(tile, above, top, True), mass_of(tile, above, top, False)
                if count > TILE:
                    others = k - mass_from(source, count, above, top, True, STEP)
                    weight = mass_from(source, count, above, top, False, STEP)
                target = p * (weight + others * tl.exp(value_of(low) - top))
                high = ordinal(top)
            if p < 1.0:
                low = find(tile, source, count, scratch, top, before, target, low, high, False, TILE, STEP, LANES)
            threshold = tl.maximum(threshold, value_of(low))
        # The likeliest is always kept.
        threshold = tl.minimum(threshold, top)
    tl.store(out + row, threshold)


def config() -> dict[str, int]:
    """A program does a CHUNK of a row; up to CAPACITY elements are listed; the search reads STEPs of them, holds a TILE."""
    return {"CHUNK": 4096, "CAPACITY": 16384, "TILE": 4096, "STEP": 8192}


def stages(num_columns: int) -> list[tuple[Any, dict[str, Any]]]:
    """The kernels in their order, each with its compile-time arguments."""
    meta = config()

    def lanes(num_warps: int, tile: int) -> dict[str, int]:
        return {"LANES": min(32 * num_warps, tile // 4), "num_warps": num_warps}

    chunk, splits = {"CHUNK": meta["CHUNK"]}, {"SPLITS": next_power_of_2(cdiv(num_columns, meta["CHUNK"]))}
    capacity = {"CAPACITY": meta["CAPACITY"]}
    tally, window = chunk | splits | capacity | lanes(4, meta["CHUNK"]), splits | capacity | {"num_warps": 4}
    search = {"TILE": meta["TILE"], "STEP": meta["STEP"]} | lanes(16, meta["STEP"])
    return [
        (peak_kernel, chunk | {"num_warps": 4}),
        (tally_kernel, tally | {"LEVEL": 0}),
        (window_kernel, window | {"LEVEL": 0}),
        (tally_kernel, tally | {"LEVEL": 1}),
        (window_kernel, window | {"LEVEL": 1}),
        (list_kernel, chunk | splits | capacity | lanes(8, meta["CHUNK"])),
        (cutoff_kernel, splits | capacity | search),
    ]


def launch(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32 [R]; see `reference`. Rows of `scaled` may be strided, columns not."""
    if not launches(scaled):
        return reference(scaled, top_k, top_p, min_p)
    num_rows, num_columns = scaled.shape
    num_splits, list_stride = cdiv(num_columns, config()["CHUNK"]), config()["CAPACITY"] + config()["TILE"]
    shapes = (num_splits,), (2, 2, num_splits, 16), (5,), (2, num_splits), (list_stride,), ()
    peaks, tallies, windows, places, listed, out = (
        scaled.new_empty((num_rows, *shape), dtype=torch.float32) for shape in shapes
    )
    if not num_rows:
        return out
    columns, criteria, rows = (num_columns, scaled.stride(0)), (top_k, top_p), (scaled, top_k, top_p)
    tally = (*rows, peaks, tallies, windows, *columns)
    window = (*criteria, tallies, windows, places, num_columns, num_splits)
    arguments = [
        (*rows, min_p, peaks, *columns),
        tally,
        window,
        tally,
        window,
        (*rows, peaks, windows, places, listed, list_stride, *columns),
        (*rows, min_p, peaks, windows, listed, list_stride, out, num_splits, *columns),
    ]
    for (kernel, constants), given in zip(stages(num_columns), arguments, strict=True):
        grid = (num_splits, num_rows) if "CHUNK" in constants else (num_rows,)
        kernel[grid](*given, **constants)
    return out
