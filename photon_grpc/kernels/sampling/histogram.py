"""The few elements of a row among which its threshold is: bins by distance from the largest, counted, weighed, listed.

    bin(x) = min(round(8 · (max(x) - x)), 255),  coarse bin = bin / 16 (two wide),  weight(x) = exp(x - max(x))

A row that has a top_k is searched by count, for k; any other by weight, for top_p · Σ weight. In the order of the bins
a running sum reaches what is searched for in one of them. Its elements are the window; by count, those of all bins
before it too, since what is done next with the k largest needs them. Where a window is of more than CAPACITY elements
its coarse bin is split in sixteen; one that still is then is not listed, and the row itself is searched.

A program does one chunk of one row, and sums are taken in the order of the chunks, which depends on nothing but the
number of columns: a row's threshold is the same in any batch. A row that filters nothing costs the launches.

Shapes: scaled logits float32 [R, V] in S = ⌈V / CHUNK⌉ chunks. peaks float32 [R, S]; tallies float32 [R, 2, 2, S, 16]:
of coarse bins and of the sixteenths of one, counts (below 2^24, so exact) and the running sum of weights; windows
float32 [R, 5]: first and last bin, the mass before them (the coarse bin before the last, by count), the mass searched
for, how many elements; places float32 [R, 2, S]: where a chunk's part of the list begins, and its size; the list
float32 [R, list_stride]. Bytes moved: 4 · R · V for each of peaks, coarse tallies and the list, and for the fine
tallies where they are needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from photon_grpc.kernels.jit import jit, tl


class LogitRows(NamedTuple):
    """Scaled logits float32 [R, num_columns]; `stride` elements from one row to the next."""

    scaled: torch.Tensor
    num_columns: int
    stride: int


class Filters(NamedTuple):
    """Of each row, or slot: top_k int64 (-1: off), top_p and min_p float32 (1 and 0: off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


class Histogram(NamedTuple):
    """Handed from one kernel to the next, shapes as above; thresholds float32 [R] is what the last of them leaves."""

    peaks: torch.Tensor
    tallies: torch.Tensor
    windows: torch.Tensor
    places: torch.Tensor
    listed: torch.Tensor
    thresholds: torch.Tensor
    list_stride: int
    num_splits: int


class HistogramSizes(NamedTuple):
    """A program does a CHUNK of a row; up to CAPACITY elements are listed; the search reads STEPs of them and holds a
    TILE.

    SPLITS: chunks of a row, as a power of two. LANES: partial sums that a program takes.
    """

    CHUNK: int = 4096
    CAPACITY: int = 16384
    TILE: int = 4096
    STEP: int = 8192
    SPLITS: int = 1
    LANES: int = 1


@jit
def criteria(filters, row, num_columns):
    """k and p as float32, whether the row is searched by count, and whether it is searched at all."""
    k, p = tl.load(filters.top_k + row), tl.load(filters.top_p + row)
    by_count = (k > 0) & (k < num_columns)
    return k.to(tl.float32), p, by_count, by_count | (p < 1.0)


@jit
def bin_of(value, top):
    """int32 in 0..255; what is no number is in the last."""
    eighths = (top - value) * 8.0
    # The sum rounds to an integer, which is then in the low bits: no conversion, of which a GPU does few at a time.
    return (tl.where(eighths < 255.0, eighths, 255.0) + 8388608.0).to(tl.int32, bitcast=True) & 255


@jit
def peak_of(peaks, row, num_splits, SPLITS: tl.constexpr):
    """The row's largest element."""
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(peaks + row * num_splits + split, mask=split < num_splits, other=-float("inf")), axis=0)


@jit
def tally_at(tallies, row, level, of_weights, num_splits):
    """The start of a row's tallies [S, 16]: level 0 coarse, 1 fine."""
    return tallies + ((row * 2 + level) * 2 + of_weights) * num_splits * 16


@jit
def load_tally(tallies, row, level, of_weights, num_splits, SPLITS: tl.constexpr):
    """float32 [SPLITS, 16], zeros behind the last chunk."""
    entry = tl.arange(0, SPLITS * 16)
    start = tally_at(tallies, row, level, of_weights, num_splits)
    return tl.reshape(tl.load(start + entry, mask=entry < num_splits * 16, other=0.0), [SPLITS, 16])


@jit
def crossing(running, before, target):
    """The bin of sixteen at whose end the running sum has reached `target`, and the sum at its beginning."""
    chosen = tl.minimum(tl.sum((running < target).to(tl.int32), axis=0), 15)
    previous = tl.sum(tl.where(tl.arange(0, 16) == chosen - 1, running, 0.0), axis=0)
    return chosen, tl.where(chosen > 0, previous, before)


@jit
def sizes_within(counts, chosen, by_count):
    """[SPLITS]: each chunk's elements in the chosen bin; by count, in those before it too."""
    bins = tl.arange(0, 16)
    within = (bins == chosen) | (by_count & (bins < chosen))
    return tl.sum(tl.where(within[None, :], counts, 0.0), axis=1)


@jit
def lanes(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """[LANES]: partial sums of the weights in bins 0..last; a lane's elements are one thread's."""
    # 1 or 0, by what a multiply-add unit does; comparing and selecting are for units of half the rate.
    within = tl.clamp((last + 1.0) - number, 0.0, 1.0)
    tile = tl.reshape(within * weight, [number.shape[0] // (4 * LANES), LANES, 4])
    return tl.sum(tl.sum(tile, axis=2), axis=0)


@jit
def lanes_2(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """[LANES, 2]: bins 0..last, 0..last + 8."""
    return tl.join(lanes(number, weight, last, LANES), lanes(number, weight, last + 8, LANES))


@jit
def lanes_4(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """[LANES, 2, 2]: four bins apart."""
    return tl.join(lanes_2(number, weight, last, LANES), lanes_2(number, weight, last + 4, LANES))


@jit
def lanes_8(number, weight, last: tl.constexpr, LANES: tl.constexpr):
    """[LANES, 2, 2, 2]: two bins apart."""
    return tl.join(lanes_4(number, weight, last, LANES), lanes_4(number, weight, last + 2, LANES))


@jit
def weigh(number, weight, LANES: tl.constexpr):
    """[16]: the running sum of the bins' weights. The sums leave their threads together: one by one it took a barrier
    each."""
    number = (number | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    tile = tl.join(lanes_8(number, weight, 0, LANES), lanes_8(number, weight, 1, LANES))
    return tl.sum(tl.reshape(tile, [LANES, 16]), axis=0)


@jit
def places_of(chosen, LANES: tl.constexpr):
    """Numbers from 0 for the chosen of a tile, lane by lane: only the lanes' totals leave their threads."""
    tile = tl.reshape(chosen, [chosen.shape[0] // (4 * LANES), LANES, 4])
    quads = tl.sum(tile, axis=2)
    totals = tl.sum(quads, axis=0)
    before = tl.cumsum(quads, axis=0) - quads + (tl.cumsum(totals, axis=0) - totals)[None, :]
    return tl.reshape(before[:, :, None] + tl.cumsum(tile, axis=2) - 1, [chosen.shape[0]])


@jit
def peak_kernel(rows, filters, histogram, SIZES: tl.constexpr):
    """Grid (S, R): the largest element of each chunk, of rows that filter anything."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _k, _p, _by_count, is_searched = criteria(filters, row, rows.num_columns)
    if is_searched | (tl.load(filters.min_p + row) > 0.0):
        column = split * SIZES.CHUNK + tl.arange(0, SIZES.CHUNK)
        value = tl.load(rows.scaled + row * rows.stride + column, mask=column < rows.num_columns, other=-float("inf"))
        tl.store(histogram.peaks + row * tl.num_programs(0) + split, tl.max(value, axis=0))


@jit
def tally_kernel(rows, filters, histogram, LEVEL: tl.constexpr, SIZES: tl.constexpr):
    """Grid (S, R): a chunk's elements in each of sixteen bins, and their weights where the row is searched by
    weight."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_splits = tl.num_programs(0)
    _k, _p, by_count, is_needed = criteria(filters, row, rows.num_columns)
    if is_needed & (LEVEL == 1):
        is_needed = tl.load(histogram.windows + row * 5 + 4) > SIZES.CAPACITY
    if is_needed:
        column = split * SIZES.CHUNK + tl.arange(0, SIZES.CHUNK)
        inside = column < rows.num_columns
        value = tl.load(rows.scaled + row * rows.stride + column, mask=inside, other=-float("inf"))
        top = peak_of(histogram.peaks, row, num_splits, SIZES.SPLITS)
        number = bin_of(value, top)
        if LEVEL == 1:
            inside &= (number >> 4) == (tl.load(histogram.windows + row * 5 + 1).to(tl.int32) >> 4)
            number = number & 15
        else:
            number = number >> 4
        bins = split * 16 + tl.arange(0, 16)
        counts = tl.histogram(number, 16, mask=inside)
        tl.store(tally_at(histogram.tallies, row, LEVEL, 0, num_splits) + bins, counts.to(tl.float32))
        if by_count == 0:
            weight = tl.where(inside, tl.exp(value - top), 0.0)
            tl.store(tally_at(histogram.tallies, row, LEVEL, 1, num_splits) + bins, weigh(number, weight, SIZES.LANES))


@jit
def window_kernel(rows, filters, histogram, LEVEL: tl.constexpr, SIZES: tl.constexpr):
    """Grid (R,): the window that the tallies of this level leave, and where the list has each chunk's part of it."""
    row, num_splits = tl.program_id(0).to(tl.int64), histogram.num_splits
    k, p, by_count, is_needed = criteria(filters, row, rows.num_columns)
    entry = histogram.windows + row * 5
    if is_needed & (LEVEL == 1):
        is_needed = tl.load(entry + 4) > SIZES.CAPACITY
    if is_needed:
        counts = load_tally(histogram.tallies, row, LEVEL, 0, num_splits, SIZES.SPLITS)
        running = tl.cumsum(tl.sum(counts, axis=0), axis=0)
        if by_count == 0:
            running = tl.sum(load_tally(histogram.tallies, row, LEVEL, 1, num_splits, SIZES.SPLITS), axis=0)
        if LEVEL == 0:
            target = tl.where(by_count, k, p * tl.max(running, axis=0))
            chosen, before = crossing(running, 0.0, target)
            sizes = sizes_within(counts, chosen, by_count)
            first, last = chosen * 16, chosen * 16 + 15
        else:
            coarse, target = tl.load(entry + 1).to(tl.int32) >> 4, tl.load(entry + 3)
            before = tl.load(entry + 2)
            sixteenth, before = crossing(before + running, before, target)
            sizes = sizes_within(counts, sixteenth, by_count)
            if by_count:
                coarse_counts = load_tally(histogram.tallies, row, 0, 0, num_splits, SIZES.SPLITS)
                sizes += sizes_within(coarse_counts, coarse - 1, by_count)
            first, last = coarse * 16 + sixteenth, coarse * 16 + sixteenth
        tl.store(entry, tl.where(by_count, 0, first).to(tl.float32))
        tl.store(entry + 1, last.to(tl.float32))
        tl.store(entry + 2, before)
        tl.store(entry + 3, target)
        tl.store(entry + 4, tl.sum(sizes, axis=0))
        split = tl.arange(0, SIZES.SPLITS)
        place = histogram.places + row * 2 * num_splits + split
        tl.store(place, tl.cumsum(sizes, axis=0) - sizes, mask=split < num_splits)
        tl.store(place + num_splits, sizes, mask=split < num_splits)


@jit
def list_kernel(rows, filters, histogram, SIZES: tl.constexpr):
    """Grid (S, R): a chunk's elements of the window, in a fixed order, behind those of the chunks before."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_splits = tl.num_programs(0)
    _k, _p, _by_count, is_searched = criteria(filters, row, rows.num_columns)
    if is_searched:
        entry, place = histogram.windows + row * 5, histogram.places + row * 2 * num_splits + split
        if (tl.load(place + num_splits) > 0) & (tl.load(entry + 4) <= SIZES.CAPACITY):
            first, last = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
            column = split * SIZES.CHUNK + tl.arange(0, SIZES.CHUNK)
            inside = column < rows.num_columns
            value = tl.load(rows.scaled + row * rows.stride + column, mask=inside, other=-float("inf"))
            number = bin_of(value, peak_of(histogram.peaks, row, num_splits, SIZES.SPLITS))
            chosen = inside & (number >= first) & (number <= last)
            position = tl.load(place).to(tl.int32) + places_of(chosen.to(tl.int32), SIZES.LANES)
            listed = histogram.listed + row * histogram.list_stride
            tl.store(listed + position, value, mask=chosen & (position < SIZES.CAPACITY))
