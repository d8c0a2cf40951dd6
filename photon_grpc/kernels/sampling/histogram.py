"""The few elements of a row that may be its threshold: sixteen bins are weighed, that of the threshold is listed.

    bin(x) = round((anchor - x) / width) within 0..15,  width = 0.2 · deviation,  anchor = center + 7.5 · width
    weight(x) = exp((x - max) / temperature), or 1

Mean and deviation are those of a sample of the row, always of the same columns; the center is where the threshold of a
normal row would be. A row that has a top_k is searched by count, for k; any other by weight, for top_p · Σ weight. In
the order of the bins a running sum reaches the target in one of them, the window. Its elements are listed; in a search
by count followed by top_p, those of all bins before it too, since the second search is among the k largest. Any choice
of bins gives the same threshold; a poor one lists more. Beside the window, elements that are above it and can win are
listed to be sampled from: noise is made for them, and for nothing below.

A program does one chunk of one row, and sums are taken in the order of the chunks, which depends on nothing but the
number of columns: a row's threshold is the same in any batch.

Shapes: logits float32 [R, V] in S = ⌈V / CHUNK⌉ chunks. Bytes moved: 4 · R · V for the tallies; as much for the lists,
but for chunks that have nothing to list, and 8 an element listed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.lang.jit import jit, tl
from photon_grpc.kernels.sampling.noise import MAX_GUMBEL, MIN_GUMBEL


class LogitRows(NamedTuple):
    """Logits float32 [R, num_columns]; `stride` elements from one row to the next."""

    logits: torch.Tensor
    num_columns: int
    stride: int


class Filters(NamedTuple):
    """Filters of every slot: top_k int64 (-1: off), top_p and min_p float32 (1 and 0: off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Search(NamedTuple):
    """State handed from one kernel to the next, float32 unless noted.

    tops [R, S]: each chunk's highest logit, infinite where one is NaN.
    tallies [R, S, 16]: the running sum of weights over the bins, relative to the chunk's highest.
    bins [R, 3]: anchor, 1 / width (0: not searched), how fast weights fall in powers of two (0: by count, -1: greedy).
    windows [R, 5]: first and last bin, the least logit that is sampled from, the mass before the window, the mass
    searched for.
    listed int64 [R, S · CHUNK], logit and id: each chunk's part of the window from its start on, elements above it from
    its end on; num_within, num_above int32 [R, S]: their numbers.
    gathered [R, TILE]: scratch.
    thresholds, best [R]: of logits / temperature, of logits.
    best_values [R, S], ids int32 [R, S]: the winner of each chunk.
    """

    tops: torch.Tensor
    tallies: torch.Tensor
    bins: torch.Tensor
    windows: torch.Tensor
    listed: torch.Tensor
    num_within: torch.Tensor
    num_above: torch.Tensor
    gathered: torch.Tensor
    thresholds: torch.Tensor
    best: torch.Tensor
    best_values: torch.Tensor
    ids: torch.Tensor
    num_splits: int


class SearchSizes(NamedTuple):
    """Sizes of the search: a program does a CHUNK of a row, reads STEPs of a list and holds a TILE.

    SPLITS: chunks of a row, as a power of two. LANES: partial sums of a program. SAMPLED: elements that a program
    makes noise for at a time. RANGE: a token whose scaled logit is this far below the best cannot win, whatever the
    noise; half more than the noise spans, so that no rounding makes them equal.
    """

    CHUNK: int = 4096
    TILE: int = 8192
    STEP: int = 4096
    SPLITS: int = 1
    LANES: int = 1
    SAMPLED: int = 512
    RANGE: float = MAX_GUMBEL - MIN_GUMBEL + 0.5


@jit
def criteria(metadata, filters, row, num_columns):
    """Return temperature, k and p as float32, whether the row is searched by count, whether it is searched."""
    slot = tl.load(metadata.slots + row)
    temperature = tl.load(metadata.temperature + slot)
    k, p = tl.load(filters.top_k + slot), tl.load(filters.top_p + slot)
    by_count = (k > 0) & (k < num_columns)
    return temperature, k.to(tl.float32), p, by_count, (temperature > 0.0) & (by_count | (p < 1.0))


@jit
def load_tops(search, row, SIZES: tl.constexpr):
    """Load [SPLITS], each chunk's highest logit; return it and the row's."""
    split = tl.arange(0, SIZES.SPLITS)
    place = search.tops + row * search.num_splits + split
    tops = tl.load(place, mask=split < search.num_splits, other=-float("inf"))
    return tops, tl.max(tops, axis=0)


@jit
def load_chunk(rows, split, row, SIZES: tl.constexpr):
    """Load float32 [CHUNK], -infinity past the row's end."""
    column = split * SIZES.CHUNK + tl.arange(0, SIZES.CHUNK)
    return tl.load(rows.logits + row * rows.stride + column, mask=column < rows.num_columns, other=-float("inf"))


@jit
def quantile(share):
    """Return the quantile of the standard normal distribution, to 0.01 (Tukey's lambda)."""
    return 4.91 * (tl.exp2(0.14 * tl.log2(share)) - tl.exp2(0.14 * tl.log2(1.0 - share)))


@jit
def choose_bins(rows, row, temperature, k, p, by_count):
    """Return anchor and 1 / width, from the finite ones of up to 1,024 elements in eight runs."""
    number = tl.arange(0, 1024)
    column = number // 128 * (rows.num_columns // 8) + number % 128
    inside = column < rows.num_columns
    logit = tl.load(rows.logits + row * rows.stride + column, mask=inside, other=float("inf"))
    is_finite = tl.abs(logit) < float("inf")
    size = tl.maximum(tl.sum(is_finite.to(tl.float32), axis=0), 1.0)
    mean = tl.sum(tl.where(is_finite, logit, 0.0), axis=0) / size
    distance = tl.where(is_finite, logit - mean, 0.0)
    deviation = tl.sqrt(tl.sum(distance * distance, axis=0) / size)
    deviation = tl.where(deviation > 0.0, deviation, 1.0)
    # Weights shift a normal distribution by its variance.
    share = tl.where(by_count, 1.0 - k / rows.num_columns, 1.0 - p)
    center = quantile(share) + tl.where(by_count, 0.0, deviation / temperature)
    center = tl.minimum(center, tl.max(distance, axis=0) / deviation)
    return mean + (center + 1.5) * deviation, 5.0 / deviation


@jit
def bin_of(logit, anchor, scale):
    """Return a bin, an integer in 0.0..15.0; NaN is in the last."""
    distance = (anchor - logit) * scale
    distance = tl.maximum(tl.where(distance < 15.0, distance, 15.0), 0.0)
    # The sum rounds to an integer; a GPU does few conversions at a time.
    return (distance + 8388608.0) - 8388608.0


@jit
def lanes(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """Return [LANES] partial sums of the weights in bins 0..last; a lane's elements are one thread's."""
    # 1 or 0 by multiply-add; comparing and selecting are done at half the rate.
    within = tl.clamp((last + 1.0) - number, 0.0, 1.0)
    tile = tl.reshape(within * weight, [number.shape[0] // (4 * LANES), LANES, 4])
    return tl.sum(tl.sum(tile, axis=2), axis=0)


@jit
def lanes_2(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """Return [LANES, 2]: bins 0..last, 0..last + 8."""
    return tl.join(lanes(number, weight, last, LANES), lanes(number, weight, last + 8, LANES))


@jit
def lanes_4(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """Return [LANES, 2, 2]: four bins apart."""
    return tl.join(lanes_2(number, weight, last, LANES), lanes_2(number, weight, last + 4, LANES))


@jit
def lanes_8(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """Return [LANES, 2, 2, 2]: two bins apart."""
    return tl.join(lanes_4(number, weight, last, LANES), lanes_4(number, weight, last + 2, LANES))


@jit
def weigh(number, weight, LANES: tl.constexpr):
    """Return [16], the running sum of the bins' weights; leaving the threads one by one took a barrier each."""
    tile = tl.join(lanes_8(number, weight, 0, LANES), lanes_8(number, weight, 1, LANES))
    return tl.sum(tl.reshape(tile, [LANES, 16]), axis=0)


@jit
def running_sum(tile, LANES: tl.constexpr):
    """Return the running sum of a tile of integers in the order of the lanes; only totals leave their threads."""
    lanes = tl.reshape(tile, [tile.shape[0] // (4 * LANES), LANES, 4])
    quads = tl.sum(lanes, axis=2)
    totals = tl.sum(quads, axis=0)
    before = tl.cumsum(quads, axis=0) - quads + (tl.cumsum(totals, axis=0) - totals)[None, :]
    return tl.reshape(before[:, :, None] + tl.cumsum(lanes, axis=2), [tile.shape[0]])


@jit
def bins_kernel(rows, metadata, filters, search, SIZES: tl.constexpr):
    """Choose the bins and weights by which a row is searched, in a grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p, by_count, is_searched = criteria(metadata, filters, row, rows.num_columns)
    anchor, scale = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    if is_searched:
        anchor, scale = choose_bins(rows, row, temperature, k, p, by_count)
    rate = tl.where(by_count, 0.0, 1.4426950408889634 / temperature)
    tl.store(search.bins + row * 3, anchor)
    tl.store(search.bins + row * 3 + 1, scale)
    tl.store(search.bins + row * 3 + 2, tl.where(temperature > 0.0, rate, -1.0))


@jit
def load_bins(search, row):
    """Load anchor, 1 / width and rate."""
    return tl.load(search.bins + row * 3), tl.load(search.bins + row * 3 + 1), tl.load(search.bins + row * 3 + 2)


@jit
def tally_kernel(rows, metadata, filters, search, SIZES: tl.constexpr):
    """Store a chunk's highest logit and its bins' running sum; of a greedy row its best. Grid (S, R)."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    anchor, scale, rate = load_bins(search, row)
    logit = load_chunk(rows, split, row, SIZES)
    top = tl.max(tl.where(logit == logit, logit, float("inf")), axis=0)
    place = row * search.num_splits + split
    tl.store(search.tops + place, top)
    if scale > 0.0:
        above = logit - tl.where(top > -float("inf"), top, 0.0)
        weight = tl.where(logit > -float("inf"), tl.exp2(above * rate), 0.0)
        tally = weigh(bin_of(logit, anchor, scale), weight, SIZES.LANES)
        tl.store(search.tallies + place * 16 + tl.arange(0, 16), tally)
    if rate < 0.0:
        best, column = tl.max(logit, axis=0, return_indices=True)
        tl.store(search.best_values + place, best)
        tl.store(search.ids + place, split * SIZES.CHUNK + column)


@jit
def find_window(search, row, tops, best, limits, SIZES: tl.constexpr):
    """Return the bin where the running sum reaches the target, the sum before it, and the target. limits: p, k."""
    p, k = limits
    rate = tl.load(search.bins + row * 3 + 2)
    entry, bins = tl.arange(0, SIZES.SPLITS * 16), tl.arange(0, 16)
    tallies = search.tallies + row * search.num_splits * 16 + entry
    tally = tl.reshape(tl.load(tallies, mask=entry < search.num_splits * 16, other=0.0), [SIZES.SPLITS, 16])
    factor = tl.where(tops > -float("inf"), tl.exp2((tops - best) * rate), 0.0)
    running = tl.sum(tally * factor[:, None], axis=0)
    total = tl.max(running, axis=0)
    target = tl.where(rate > 0.0, p * total, tl.minimum(k, total))
    chosen = tl.minimum(tl.sum((running < target).to(tl.int32), axis=0), 15)
    return chosen.to(tl.float32), tl.sum(tl.where(bins == chosen - 1, running, 0.0), axis=0), target


@jit
def least_of(filters, slot, best, temperature, SIZES: tl.constexpr):
    """Return a lower bound for the logits that min-p keeps and that can win."""
    top = tl.div_rn(best, temperature)
    least = tl.maximum(top - SIZES.RANGE, tl.minimum(top, top + tl.log(tl.load(filters.min_p + slot)))) * temperature
    # A value that is divided and rounded later must not exceed it.
    return least - (tl.abs(least) * 1e-6 + 1e-30)


@jit
def window_kernel(rows, metadata, filters, search, SIZES: tl.constexpr):
    """Choose the window of a row, in a grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p, by_count, is_searched = criteria(metadata, filters, row, rows.num_columns)
    tops, best = load_tops(search, row, SIZES)
    tl.store(search.best + row, best)
    # Of a row that is not searched there is no window, and all is above it; of a greedy one nothing is sampled.
    least = tl.full([], float("inf"), tl.float32)
    if temperature > 0.0:
        least = least_of(filters, tl.load(metadata.slots + row), best, temperature, SIZES)
    first, last = tl.full([], 16.0, tl.float32), tl.full([], -1.0, tl.float32)
    if is_searched:
        last, before, target = find_window(search, row, tops, best, (p, k), SIZES)
        has_all_before = by_count & (p < 1.0)
        first = tl.where(has_all_before, 0.0, last)
        tl.store(search.windows + row * 5 + 3, tl.where(has_all_before, 0.0, before))
        tl.store(search.windows + row * 5 + 4, target)
    tl.store(search.windows + row * 5, first)
    tl.store(search.windows + row * 5 + 1, last)
    tl.store(search.windows + row * 5 + 2, least)


@jit
def list_kernel(rows, metadata, filters, search, SIZES: tl.constexpr):
    """List a chunk's elements of the window and those above it that can win, in a fixed order; grid (S, R)."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place, count = row * search.num_splits + split, tl.full([], 0, tl.int32)
    anchor, scale, _rate = load_bins(search, row)
    entry = search.windows + row * 5
    first, last, least = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    top = tl.load(search.tops + place)
    if (bin_of(top, anchor, scale) <= last) | ((last < 0.0) & (top >= least)):
        logit = load_chunk(rows, split, row, SIZES)
        number = bin_of(logit, anchor, scale)
        is_within = (logit > -float("inf")) & (number >= first) & (number <= last)
        mark = is_within.to(tl.int32) + ((number < first) & (logit >= least)).to(tl.int32) * 65536
        running = running_sum(mark, SIZES.LANES)
        offset = tl.where(is_within, (running & 65535) - 1, SIZES.CHUNK - (running >> 16))
        column = split * SIZES.CHUNK + tl.arange(0, SIZES.CHUNK)
        pair = (logit.to(tl.int32, bitcast=True).to(tl.int64) << 32) | column.to(tl.int64)
        tl.store(search.listed + place * SIZES.CHUNK + offset, pair, mask=mark > 0)
        count = tl.sum(mark, axis=0)
    tl.store(search.num_within + place, count & 65535)
    tl.store(search.num_above + place, count >> 16)
