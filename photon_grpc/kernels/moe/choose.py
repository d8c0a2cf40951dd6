"""Kernel of a router's choice: experts and weights of each token, and the work list (`route.py` has the formula)."""

from __future__ import annotations

from typing import NamedTuple

from photon_grpc.kernels.lang.gluon import gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import jit, tl


@jit
def taken_of(preferred, number, inside, C: tl.constexpr):
    """Return which experts are in groups that are taken."""
    GROUPS: tl.constexpr = C.GROUPS
    TAKEN: tl.constexpr = C.GROUPS_TAKEN
    group, slot = number // C.GROUP_SIZE, tl.arange(0, C.GROUPS_PAD)
    sums = slot * 0.0 - float("inf")
    for each in tl.static_range(GROUPS):
        of = tl.where(inside & (group == each), preferred, -float("inf"))
        first = tl.max(of, 0)
        at = tl.min(tl.where(of == first, number, 2147483647), 0)
        second = tl.max(tl.where(number == at, -float("inf"), of), 0)
        sums = tl.where(slot == each, first + second, sums)
    is_taken = number < 0
    for _ in tl.static_range(TAKEN):
        best = tl.max(sums, 0)
        at = tl.min(tl.where(sums == best, slot, 2147483647), 0)
        is_taken = is_taken | (group == at)
        sums = tl.where(slot == at, -float("inf"), sums)
    return is_taken


@jit
def chosen_of(s, bias, number, inside, place, C: tl.constexpr):
    """Return the experts and the weights of one token with scores s, as `reference` does."""
    TOP_K: tl.constexpr = C.TOP_K
    fails = tl.sum((s != s).to(tl.int32), 0) > 0
    most = tl.max(s, 0)
    total = tl.sum(tl.where(inside, tl.exp(s - most), 0.0), 0)
    # Integers that rise with the numbers; of equal ones the lowest expert is taken.
    preferred = s
    if bias is not None:
        preferred = 1.0 / (1.0 + tl.exp(-s)) + tl.load(bias + number, mask=inside, other=0.0)
        if C.GROUPS > 0:
            preferred = tl.where(taken_of(preferred, number, inside, C), preferred, -float("inf"))
    bits = tl.where(preferred == 0.0, 0.0, preferred).to(tl.int32, bitcast=True)
    rank = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)
    # Both maxima and minima of int32 are one instruction of a warp each; those of int64 would be ten that wait for each
    # other. `free` are the numbers that are not taken yet.
    free = number
    chosen = place * 0 - 1
    value = place * 0.0
    for j in tl.static_range(TOP_K):
        best = tl.max(rank, 0)
        at = tl.min(tl.where(rank == best, free, 2147483647), 0)
        rank = tl.where(number == at, -2147483648, rank)
        free = tl.where(number == at, 2147483647, free)
        chosen = tl.where(place == j, at, chosen)
        if bias is None:
            bits = tl.where(best < 0, best ^ 0x7FFFFFFF, best)
            score = bits.to(tl.float32, bitcast=True)
        else:
            score = tl.sum(tl.where(number == at, s, 0.0), 0)
        value = tl.where(place == j, score, value)
    chosen = tl.where(fails & (place < C.TOP_K), place, chosen)
    if C.IS_SOFTMAX:
        weight = tl.exp(value - most) / total
    else:
        weight = 1.0 / (1.0 + tl.exp(-value))
    weight = tl.where(place < C.TOP_K, weight, 0.0)
    if C.RENORMALISES:
        weight = weight / tl.sum(weight, 0)
    weight = tl.where(fails, float("nan"), weight * C.SCALE)
    if C.NUM_KEPT > 0:
        is_kept = (chosen >= C.FIRST_KEPT) & (chosen < C.FIRST_KEPT + C.NUM_KEPT)
        chosen = tl.where(is_kept, chosen - C.FIRST_KEPT, -1)
        weight = tl.where(is_kept, weight, 0.0)
    is_shared = (place >= C.TOP_K) & (place < C.ALL)
    return tl.where(is_shared, C.OWN + place - C.TOP_K, chosen), tl.where(is_shared, 1.0, weight)


@jit
def add_to_tally(tally, most, reached, pairs):
    """Count a call whose busiest expert has `most` pairs."""
    if tally is not None:
        tl.store(tally, tl.load(tally) + tl.minimum(most, 1).to(tl.int64))
        tl.store(tally + 1, tl.load(tally + 1) + reached.to(tl.int64))
        tl.store(tally + 2, tl.load(tally + 2) + most.to(tl.int64))
        tl.store(tally + 3, tl.load(tally + 3) + pairs.to(tl.int64))


@jit
def list_one(work, tally, chosen, place, C: tl.constexpr):
    """Make the work list of a single token: an entry for each of its experts."""
    work_expert, work_first, work_count, work_size, pairs, work_row = work
    takes = (chosen >= 0) & (place < C.ALL)
    entry = tl.cumsum(takes.to(tl.int32), 0) - 1
    tl.store(work_expert + entry, chosen, mask=takes)
    tl.store(work_first + entry, entry * 0, mask=takes)
    tl.store(work_count + entry, entry * 0 + 1, mask=takes)
    tl.store(work_row + entry, entry, mask=takes)
    tl.store(pairs + chosen, place, mask=takes)
    tl.store(work_size, tl.sum(takes.to(tl.int32), 0))
    routed = tl.sum((takes & (place < C.TOP_K)).to(tl.int32), 0)
    add_to_tally(tally, tl.minimum(routed, 1), routed, routed)


@jit
def list_all(work, counters, tally, BLOCK: tl.constexpr, C: tl.constexpr):
    """Make the work list from the pairs of each expert, and leave the counters zero."""
    work_expert, work_first, work_count, work_size, _pairs, work_row = work
    number = tl.arange(0, C.EXPERTS_PAD)
    inside = number < C.OWN + C.ALL - C.TOP_K
    count = tl.load(counters + number, mask=inside, other=0, cache_modifier=".cg")
    tl.store(counters + number, 0, mask=inside)
    tl.store(counters + C.OWN + C.ALL - C.TOP_K, 0)
    blocks = (count + BLOCK - 1) // BLOCK
    begin = tl.cumsum(blocks, 0) - blocks
    row = tl.cumsum(count, 0) - count
    tl.store(work_size, tl.sum(blocks, 0))
    routed = tl.where(number < C.OWN, count, 0)
    add_to_tally(tally, tl.max(routed, 0), tl.sum((routed > 0).to(tl.int32), 0), tl.sum(routed, 0))
    for block in range(tl.max(blocks, 0)):
        has = blocks > block
        tl.store(work_expert + begin + block, number, mask=has)
        tl.store(work_first + begin + block, number * 0 + block * BLOCK, mask=has)
        tl.store(work_count + begin + block, count, mask=has)
        tl.store(work_row + begin + block, row + block * BLOCK, mask=has)


class ChoiceForm(NamedTuple):
    """The constants of a choice.

    ALL: the experts of a token, those that every token reaches included. OWN: the experts that stay.
    """

    EXPERTS_PAD: int
    OWN: int
    TOP_K: int
    ALL: int
    PLACES_PAD: int
    IS_SOFTMAX: bool
    RENORMALISES: bool
    SCALE: float
    FIRST_KEPT: int
    NUM_KEPT: int
    GROUPS: int
    GROUPS_TAKEN: int
    GROUPS_PAD: int
    GROUP_SIZE: int


@jit
def choose_token(
    scores, bias, num_real, experts, weights, token, num_tokens,
    EXPERTS: tl.constexpr, SLICES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store the experts and weights of one token, -1 and 0 for padding; return the experts, and their places."""
    number = tl.arange(0, C.EXPERTS_PAD)
    inside = number < EXPERTS
    # Read before it is known whether the token is one: all are in memory.
    at = scores + token.to(tl.int64) * EXPERTS + number
    s = tl.load(at, mask=inside, other=-float("inf"), cache_modifier=".cg")
    for part in tl.static_range(1, SLICES):
        at = scores + (part * num_tokens + token).to(tl.int64) * EXPERTS + number
        s += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    is_real = token >= 0
    if num_real is not None:
        is_real = token < tl.load(num_real)
    place = tl.arange(0, C.PLACES_PAD)
    chosen = place * 0 - 1
    value = place * 0.0
    if is_real:
        chosen, value = chosen_of(s, bias, number, inside, place, C)
    to = token * C.ALL + place
    tl.store(experts + to, chosen, mask=place < C.ALL)
    tl.store(weights + to, value, mask=place < C.ALL)
    return chosen, place


@jit
def choose_kernel(
    scores, bias, num_real, experts, weights, work, counters, tally, num_tokens,
    EXPERTS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose for one token per program; the last to finish makes the work list.

    counters: int32 [experts + 1], zero before and after: the pairs of each expert, the programs that are done.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    chosen, place = choose_token(scores, bias, num_real, experts, weights, token, num_tokens, EXPERTS, SLICES, C)
    takes = (chosen >= 0) & (place < C.ALL)
    expert = tl.maximum(chosen, 0)
    rank = tl.atomic_add(counters + expert, 1, mask=takes, sem="relaxed")
    tl.store(work[4] + expert.to(tl.int64) * num_tokens + rank, token * C.ALL + place, mask=takes)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + C.OWN + C.ALL - C.TOP_K, 1, sem="acq_rel")
    if arrived == num_tokens - 1:
        tl.debug_barrier()
        list_all(work, counters, tally, BLOCK, C)
