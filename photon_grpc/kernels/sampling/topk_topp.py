"""top-k, top-p and min-p as one number per row: the smallest scaled logit that is kept, s = logit / temperature.

Order and meaning are those of transformers' warpers: top-k, then top-p over what is left, then min-p. Tokens whose
scaled logits are equal are kept or dropped together.

    after top-k   v_k, the k-th largest
    after top-p   the largest v with  Σ exp(s) over s >= v  not below  top_p · Σ exp(s) over the k largest
    after min-p   max(s) + log(min_p)
    threshold   = the largest of the three

Nothing is sorted. Two passes over the rows list the few elements among which v_k or v is (`histogram.py`); then one
program a row halves the interval of floats, in the order of their numbers, until one is left. Sums are of float32, in
an order that depends on the row and the number of columns alone: where Σ exp(s) meets top_p but for their rounding, the
threshold may be the element before or after, and is the same in any batch.

Shapes: logits float32 [R, V], SamplingMetadata of the R rows, Filters of every slot -> Search, whose thresholds and
best are float32 [R]. Bytes moved: those of the lists, once to six times. Scratch: 8 · V bytes a row.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from photon_grpc.kernels.lang.jit import cdiv, jit, next_power_of_2, tl
from photon_grpc.kernels.sampling.histogram import (
    Filters,
    LogitRows,
    Search,
    SearchSizes,
    bins_kernel,
    criteria,
    list_kernel,
    running_sum,
    tally_kernel,
    window_kernel,
)
from photon_grpc.kernels.sampling.sample import SamplingMetadata

#: The sizes of every launch, from which SPLITS and LANES follow.
SIZES = SearchSizes()


def reference(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return thresholds in torch, which sorts."""
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
    """Return uint32 in the order of the floats; zeros of both signs are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@jit
def value_of(number):
    """Return the float of an ordinal."""
    bits = (number ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def weight_of(logit, weighing):
    """Return each element's weight in the mass. weighing: highest logit, 1.44 / temperature, whether by count."""
    best, rate, by_count = weighing
    return tl.where(by_count, 1.0, tl.exp2((logit - best) * rate))


@jit
def mass_of(logit, weight, bound):
    """Return the mass of a tile's elements that are not below `bound`."""
    return tl.sum(tl.where(logit >= bound, weight, 0.0), axis=0)


@jit
def load(part, start, SIZE: tl.constexpr, SIZES: tl.constexpr):
    """Load [SIZE] logits, SIZE / SPLITS of each chunk's part of the list from `start` on; NaN past an end.

    part: the list, the length of each chunk's part, the longest of them, room for TILE elements.
    """
    listed, counts, _longest, _gathered = part
    inner = start + tl.arange(0, SIZE // SIZES.SPLITS)
    place = tl.arange(0, SIZES.SPLITS)[:, None] * SIZES.CHUNK + inner[None, :]
    entry = tl.load(listed + place, mask=inner[None, :] < counts[:, None], other=0x7FC0000000000000)
    return tl.reshape((entry >> 32).to(tl.int32).to(tl.float32, bitcast=True), [SIZE])


@jit
def number_and_mass(part, bound, weighing, SIZES: tl.constexpr):
    """Return the number of elements of the list that are not below `bound`, and their mass."""
    number, mass = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    for start in range(0, part[2], SIZES.STEP // SIZES.SPLITS):
        logit = load(part, start, SIZES.STEP, SIZES)
        number += tl.sum((logit >= bound).to(tl.float32), axis=0)
        mass += mass_of(logit, weight_of(logit, weighing), bound)
    return number, mass


@jit
def narrow(part, weighing, masses, ends, SIZES: tl.constexpr):
    """Halve low..high until it has at most TILE elements.

    Returns the new low and high, and the mass above high with `before`. masses and ends are those of `find`.
    """
    before, target = masses
    low, high = ends
    not_below = tl.sum(part[1], axis=0).to(tl.float32)
    above, mass_above = tl.full([], 0.0, tl.float32), before
    while (low < high) & (not_below - above > SIZES.TILE):
        middle = high - ((high - low) >> 1)
        number, mass = number_and_mass(part, value_of(middle), weighing, SIZES)
        if before + mass >= target:
            low, not_below = middle, number
        else:
            high, above, mass_above = middle - 1, number, before + mass
    return low, high, mass_above


@jit
def gather(part, low, high, SIZES: tl.constexpr):
    """Return the elements of low..high, at most TILE of them, as a tile."""
    _listed, _counts, longest, gathered = part
    place = 0
    for start in range(0, longest, SIZES.STEP // SIZES.SPLITS):
        logit = load(part, start, SIZES.STEP, SIZES)
        bits = ordinal(logit)
        chosen = ((bits >= low) & (bits <= high) & (logit == logit)).to(tl.int32)
        position = place + running_sum(chosen, SIZES.LANES) - 1
        tl.store(gathered + position, logit, mask=(chosen > 0) & (position < SIZES.TILE))
        place += tl.sum(chosen, axis=0)
    tl.debug_barrier()
    number = tl.arange(0, SIZES.TILE)
    return tl.load(gathered + number, mask=number < place, other=float("nan"))


@jit
def find(tile, part, weighing, masses, ends, SIZES: tl.constexpr):
    """Return the largest ordinal in low..high above which the mass, with `before`, reaches `target`.

    Ordinal low itself reaches it.

    `tile` has all of the list, if it can. masses: before, target. ends: low, high.
    """
    before, target = masses
    low, high = ends
    if part[2] > SIZES.TILE // SIZES.SPLITS:
        low, high, before = narrow(part, weighing, masses, ends, SIZES)
        tile = gather(part, low, high, SIZES)
    weight = weight_of(tile, weighing)
    while low < high:
        middle = high - ((high - low) >> 1)
        if before + mass_of(tile, weight, value_of(middle)) >= target:
            low = middle
        else:
            high = middle - 1
    return low


@jit
def range_of(logit):
    """Return the least and the largest ordinal of a tile's elements."""
    bits = ordinal(logit)
    return tl.min(tl.where(logit == logit, bits, 0xFFFFFFFF), axis=0), tl.max(tl.where(logit == logit, bits, 0), axis=0)


@jit
def search_list(part, scale, masses, p, by_count, SIZES: tl.constexpr):
    """Return the lowest logit that top-k and top-p keep in a row that is searched.

    scale: highest logit, 1.44 / temperature. masses: before, target.
    """
    best, rate = scale
    before, target = masses
    tile = load(part, 0, SIZES.TILE, SIZES)
    low, high = range_of(tile)
    for start in range(SIZES.TILE // SIZES.SPLITS, part[2], SIZES.STEP // SIZES.SPLITS):
        lower, higher = range_of(load(part, start, SIZES.STEP, SIZES))
        low, high = tl.minimum(low, lower), tl.maximum(high, higher)
    # Nothing is listed where the target is 0.
    low = tl.minimum(low, ordinal(best))
    high = tl.maximum(high, low)
    for number in range(tl.where(by_count & (p < 1.0), 2, 1)):
        if number == 1:
            # What the k largest weigh; of those that equal the k-th, as many as make up k.
            above, weight = number_and_mass(part, value_of(low + 1), (best, rate, False), SIZES)
            target = p * (weight + (target - above) * tl.exp2((value_of(low) - best) * rate))
            high = ordinal(best)
        weighing = best, rate, by_count & (number == 0)
        low = find(tile, part, weighing, (before, target), (low, high), SIZES)
    return value_of(low)


@jit
def threshold_kernel(rows, metadata, filters, search, SIZES: tl.constexpr):
    """Store the threshold of one row per program, from its list and min-p."""
    row = tl.program_id(0).to(tl.int64)
    temperature, _k, p, by_count, is_searched = criteria(metadata, filters, row, rows.num_columns)
    best = tl.load(search.best + row)
    threshold = tl.full([], -float("inf"), tl.float32)
    if (temperature > 0.0) & (tl.abs(best) < float("inf")):
        top = tl.div_rn(best, temperature)
        threshold = top + tl.log(tl.load(filters.min_p + tl.load(metadata.slots + row)))
        if is_searched:
            split = tl.arange(0, SIZES.SPLITS)
            counts = search.num_within + row * search.num_splits + split
            listed = search.listed + row * search.num_splits * SIZES.CHUNK
            counts = tl.load(counts, mask=split < search.num_splits, other=0)
            masses = tl.load(search.windows + row * 5 + 3), tl.load(search.windows + row * 5 + 4)
            gathered, scale = search.gathered + row * SIZES.TILE, (best, 1.4426950408889634 / temperature)
            part = (listed, counts, tl.max(counts, axis=0), gathered)
            found = search_list(part, scale, masses, p, by_count, SIZES)
            threshold = tl.maximum(threshold, tl.div_rn(found, temperature))
        # The likeliest is always kept.
        threshold = tl.minimum(threshold, top)
    tl.store(search.thresholds + row, threshold)


@functools.cache
def stages(num_columns: int, sizes: SearchSizes = SIZES) -> list[tuple[Any, dict[str, Any]]]:
    """Return the kernels in order, each with its compile-time arguments."""
    sizes = sizes._replace(SPLITS=next_power_of_2(cdiv(num_columns, sizes.CHUNK)))

    def options(num_warps: int, tile: int) -> dict[str, Any]:
        return {"SIZES": sizes._replace(LANES=min(32 * num_warps, tile // 4)), "num_warps": num_warps}

    plain = {"SIZES": sizes, "num_warps": 4}
    return [
        (bins_kernel, plain),
        (tally_kernel, options(8, sizes.CHUNK)),
        (window_kernel, plain),
        (list_kernel, options(8, sizes.CHUNK)),
        (threshold_kernel, options(16, sizes.STEP)),
    ]


def launch(logits: torch.Tensor, metadata: SamplingMetadata, filters: Filters) -> Search:
    """Return the thresholds of `reference`, for logits / temperature by slot.

    They have no meaning for greedy rows and are -infinity for rows that are not finite. Rows of `logits` may be
    strided, columns not.
    """
    num_rows, num_columns = logits.shape
    num_splits = cdiv(num_columns, SIZES.CHUNK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return logits.new_empty((num_rows, *shape), dtype=dtype)

    search = Search(
        tops=empty(num_splits),
        tallies=empty(num_splits, 16),
        bins=empty(3),
        windows=empty(5),
        listed=empty(num_splits * SIZES.CHUNK, dtype=torch.int64),
        num_within=empty(num_splits, dtype=torch.int32),
        num_above=empty(num_splits, dtype=torch.int32),
        gathered=empty(SIZES.TILE),
        thresholds=empty(),
        best=empty(),
        best_values=empty(num_splits),
        ids=empty(num_splits, dtype=torch.int32),
        num_splits=num_splits,
    )
    rows = LogitRows(logits, num_columns, logits.stride(0))
    for kernel, constants in stages(num_columns, SIZES) if num_rows else ():
        grid = (num_splits, num_rows) if kernel in (tally_kernel, list_kernel) else (num_rows,)
        kernel[grid](rows, metadata, filters, search, **constants)
    return search
