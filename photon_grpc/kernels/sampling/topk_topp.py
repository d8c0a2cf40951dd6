"""top-k, top-p and min-p as one number per row: the smallest logit that is kept.

Order and meaning are those of transformers' warpers: top-k, then top-p over what is left, then min-p. Tokens whose
logits are equal are kept or dropped together.

    after top-k   v_k, the k-th largest
    after top-p   the largest v with  Σ exp(x) over x >= v  not below  top_p · Σ exp(x) over the k largest
    after min-p   max(x) + log(min_p)
    threshold   = the largest of the three

Nothing is sorted. Passes over the rows list the few elements among which v_k or v is (`histogram.py`); then one program
a row halves the interval of floats, in the order of their numbers, until one is left. Where there are too many to list
(flat rows, a large k) it does so over the row itself: right, and slower. Sums are taken in a fixed order.

Shapes: scaled logits float32 [R, V], top_k int64 [R] (-1: off), top_p and min_p float32 [R] (1 and 0: off) -> float32
[R]. Bytes moved: 4 · R · V three times, four where a nucleus is wide, once for min-p alone; nothing for rows that
filter nothing.
Scratch: CAPACITY + TILE floats a row.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from photon_grpc.kernels.jit import cdiv, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.sampling.histogram import (
    Filters,
    Histogram,
    HistogramSizes,
    LogitRows,
    bin_of,
    criteria,
    list_kernel,
    peak_kernel,
    peak_of,
    places_of,
    tally_kernel,
    window_kernel,
)

#: Of every launch; SPLITS and LANES follow from them.
SIZES = HistogramSizes()


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
def narrow(source, count, top, before, target, low, high, BY_COUNT: tl.constexpr, SIZES: tl.constexpr):
    """Halve low..high until it has at most TILE elements: the new low and high, and the mass above high with
    `before`."""
    not_below, above, mass_above = count.to(tl.float32), tl.full([], 0.0, tl.float32), before
    while (low < high) & (not_below - above > SIZES.TILE):
        middle = high - ((high - low) >> 1)
        bound = value_of(middle)
        number, mass = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        for start in range(0, count, SIZES.STEP):
            value = load(source, start, count, SIZES.STEP)
            number += mass_of(value, bound, top, True)
            mass += mass_of(value, bound, top, BY_COUNT)
        mass += before
        if mass >= target:
            low, not_below = middle, number
        else:
            high, above, mass_above = middle - 1, number, mass
    return low, high, mass_above


@jit
def gather(source, count, low, high, scratch, SIZES: tl.constexpr):
    """The elements of low..high, TILE of them at most, as a tile; by way of `scratch` [TILE]."""
    place = 0
    for start in range(0, count, SIZES.STEP):
        value = load(source, start, count, SIZES.STEP)
        bits = ordinal(value)
        chosen = ((bits >= low) & (bits <= high) & (value == value)).to(tl.int32)
        position = place + places_of(chosen, SIZES.LANES)
        tl.store(scratch + position, value, mask=(chosen > 0) & (position < SIZES.TILE))
        place += tl.sum(chosen, axis=0)
    tl.debug_barrier()
    return load(scratch, 0, tl.minimum(place, SIZES.TILE), SIZES.TILE)


@jit
def find(tile, source, count, scratch, top, before, target, low, high, BY_COUNT: tl.constexpr, SIZES: tl.constexpr):
    """The largest ordinal in low..high from which on the elements, with the mass `before` them, reach `target`; low
    does.

    `tile` has all `count` elements at `source`, if it can.
    """
    if count > SIZES.TILE:
        low, high, before = narrow(source, count, top, before, target, low, high, BY_COUNT, SIZES)
        tile = gather(source, count, low, high, scratch, SIZES)
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
def threshold_kernel(rows, filters, histogram, SIZES: tl.constexpr):
    """One program a row: the element of the window that the row is searched for, and min-p."""
    row = tl.program_id(0).to(tl.int64)
    k, p, by_count, is_searched = criteria(filters, row, rows.num_columns)
    least = tl.log(tl.load(filters.min_p + row))
    threshold = tl.full([], -float("inf"), tl.float32)
    if is_searched | (least > threshold):
        top = peak_of(histogram.peaks, row, histogram.num_splits, SIZES.SPLITS)
        threshold = top + least
        if is_searched:
            entry = histogram.windows + row * 5
            first, last = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
            before, target, count = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4).to(tl.int32)
            source = histogram.listed + row * histogram.list_stride
            scratch = source + SIZES.CAPACITY
            before = tl.where(by_count | (count > SIZES.CAPACITY), 0.0, before)
            if count > SIZES.CAPACITY:
                count, source = rows.num_columns, rows.scaled + row * rows.stride
            tile = load(source, 0, count, SIZES.TILE)
            low, high = range_of(tile, top, first, last)
            for start in range(SIZES.TILE, count, SIZES.STEP):
                lower, higher = range_of(load(source, start, count, SIZES.STEP), top, first, last)
                low, high = tl.minimum(low, lower), tl.maximum(high, higher)
            # Sums of bins and of sixteenths round differently: the bin that has the crossing may be empty.
            low = tl.where(low <= high, low, ordinal(top + 0.0625 - first.to(tl.float32) * 0.125))
            if by_count:
                low = find(tile, source, count, scratch, top, before, target, low, high, True, SIZES)
                # What the k largest weigh; of those that equal the k-th, as many as make up k.
                above = value_of(low + 1)
                others, weight = k - mass_of(tile, above, top, True), mass_of(tile, above, top, False)
                if count > SIZES.TILE:
                    others = k - mass_from(source, count, above, top, True, SIZES.STEP)
                    weight = mass_from(source, count, above, top, False, SIZES.STEP)
                target = p * (weight + others * tl.exp(value_of(low) - top))
                high = ordinal(top)
            if p < 1.0:
                low = find(tile, source, count, scratch, top, before, target, low, high, False, SIZES)
            threshold = tl.maximum(threshold, value_of(low))
        # The likeliest is always kept.
        threshold = tl.minimum(threshold, top)
    tl.store(histogram.thresholds + row, threshold)


@functools.cache
def stages(num_columns: int, sizes: HistogramSizes = SIZES) -> list[tuple[Any, dict[str, Any]]]:
    """The kernels in their order, each with its compile-time arguments."""
    sizes = sizes._replace(SPLITS=next_power_of_2(cdiv(num_columns, sizes.CHUNK)))

    def options(num_warps: int, tile: int, **more: int) -> dict[str, Any]:
        return {"SIZES": sizes._replace(LANES=min(32 * num_warps, tile // 4)), "num_warps": num_warps} | more

    plain = {"SIZES": sizes, "num_warps": 4}
    return [
        (peak_kernel, plain),
        (tally_kernel, options(4, sizes.CHUNK, LEVEL=0)),
        (window_kernel, plain | {"LEVEL": 0}),
        (tally_kernel, options(4, sizes.CHUNK, LEVEL=1)),
        (window_kernel, plain | {"LEVEL": 1}),
        (list_kernel, options(8, sizes.CHUNK)),
        (threshold_kernel, options(16, sizes.STEP)),
    ]


def launch(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32 [R]; see `reference`. Rows of `scaled` may be strided, columns not."""
    if not launches(scaled):
        return reference(scaled, top_k, top_p, min_p)
    num_rows, num_columns = scaled.shape
    num_splits, list_stride = cdiv(num_columns, SIZES.CHUNK), SIZES.CAPACITY + SIZES.TILE
    shapes = (num_splits,), (2, 2, num_splits, 16), (5,), (2, num_splits), (list_stride,), ()
    buffers = [scaled.new_empty((num_rows, *shape), dtype=torch.float32) for shape in shapes]
    rows, filters = LogitRows(scaled, num_columns, scaled.stride(0)), Filters(top_k, top_p, min_p)
    histogram = Histogram(*buffers, list_stride, num_splits)
    for kernel, constants in stages(num_columns, SIZES) if num_rows else ():
        grid = (num_rows,) if kernel in (window_kernel, threshold_kernel) else (num_splits, num_rows)
        kernel[grid](rows, filters, histogram, **constants)
    return histogram.thresholds
