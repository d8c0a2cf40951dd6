"""The experts of each token, and for products of many experts the list of what each is to multiply.

    s = x Wᵀ in float32
    experts: the top_k largest of s, of equal ones the lower numbers, in falling order
    weights: softmax(s) or 1 / (1 + exp(-s)) at those, divided by their sum if the form renormalises, times scale

`tally` int64 [4] counts calls, experts that were reached, pairs of the busiest expert, all pairs.

Behind its own each token has the experts E … E + num_shared - 1, which every token reaches, with weight 1.

A token whose numbers hold a NaN has the experts 0 … top_k - 1 and weights NaN: it alone fails. Tokens from num_real on
are padding: their experts are -1, their weights 0.

Shapes: x [T, H], W [E, H], num_real int32 [1] or None -> experts int32 [T, top_k + num_shared], weights float32 of that
shape. With a norm x is normalised first, as `rms_norm.py` does.
Bytes moved: (E + T) · H · itemsize, all else is small.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels import rms_norm
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import tree_sum
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl


class RouterForm(NamedTuple):
    """The formula of a router.

    is_softmax: of all experts' numbers; else each has a sigmoid. scale: of the weights. first_kept, num_kept (0: all):
    the experts that stay, numbered from 0; others become -1 with weight 0. num_shared: experts that every token
    reaches, behind those that stay.
    """

    top_k: int
    is_softmax: bool = True
    renormalises: bool = True
    scale: float = 1.0
    first_kept: int = 0
    num_kept: int = 0
    num_shared: int = 0


class WorkList(NamedTuple):
    """The products of experts: entry i is the pairs `first[i]` to `min(first[i] + block, count[i])` of `expert[i]`.

    expert, first, count: int32 [entries]; size: int32 [1], the entries in use. pairs: int32 [E, T], of each expert its
    token · top_k + place in any order.
    """

    expert: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    size: torch.Tensor
    pairs: torch.Tensor


class Routing(NamedTuple):
    """The experts and weights of T tokens; work: for products of many experts, `block` pairs at a time."""

    experts: torch.Tensor
    weights: torch.Tensor
    work: WorkList | None = None
    block: int = 0


def reference(
    x: torch.Tensor, weight: torch.Tensor, form: RouterForm, num_real: torch.Tensor | None,
    tally: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    """Route in torch; add to the tally."""
    scores = x.float() @ weight.float().t()
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : form.top_k]
    weights = (scores.softmax(-1) if form.is_softmax else scores.sigmoid()).gather(1, chosen)
    if form.renormalises:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * form.scale
    fails = scores.isnan().any(-1, keepdim=True)
    experts = torch.where(fails, torch.arange(form.top_k, device=x.device), chosen).int()
    weights = torch.where(fails, torch.nan, weights)
    if form.num_kept:
        is_kept = (experts >= form.first_kept) & (experts < form.first_kept + form.num_kept)
        experts = torch.where(is_kept, experts - form.first_kept, -1)
        weights = torch.where(is_kept, weights, 0.0)
    if form.num_shared:
        own = form.num_kept or weight.shape[0]
        shared = torch.arange(own, own + form.num_shared, device=x.device, dtype=torch.int32)
        experts = torch.cat((experts, shared.expand(x.shape[0], -1)), -1)
        weights = torch.nn.functional.pad(weights, (0, form.num_shared), value=1.0)
    if num_real is not None:
        is_real = (torch.arange(x.shape[0], device=x.device) < num_real)[:, None]
        experts, weights = torch.where(is_real, experts, -1), torch.where(is_real, weights, 0.0)
    if tally is not None:
        routed = experts[:, : form.top_k].flatten()
        counts = torch.bincount(routed + 1, minlength=weight.shape[0] + 1)[1:]
        tally += torch.stack(((counts.max() > 0).long(), (counts > 0).sum(), counts.max(), counts.sum()))
    return Routing(experts, weights)


@jit
def scores_kernel(
    x, norm, weight, scores, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write scores [slices, T, E] in float32: BM tokens, BE experts and COLUMNS columns per program.

    norm: a StreamNorm, whose normalised x is stored, or None.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    of_token, of_expert = (token < num_tokens)[:, None], (expert < EXPERTS)[:, None]
    acc = tl.zeros([BE, BM], tl.float32)
    if norm is not None:
        group = tl.arange(0, 2**LEVELS)
        at = norm.partial + token[:, None] * (HIDDEN // 16) + group[None, :]
        sums = tl.load(at, mask=of_token & (group < HIDDEN // 16)[None, :], other=0.0)
        scale = tl.rsqrt(tree_sum(sums) / HIDDEN + norm.eps)[:, None]
    for start in range(0, COLUMNS, BK):
        column = tl.program_id(2) * COLUMNS + start + tl.arange(0, BK)
        inside = (column < HIDDEN)[None, :]
        w = tl.load(weight + expert[:, None] * HIDDEN + column[None, :], mask=of_expert & inside, other=0.0)
        values = tl.load(x + token[:, None] * HIDDEN + column[None, :], mask=of_token & inside, other=0.0)
        if norm is not None:
            kind: tl.constexpr = values.dtype
            factor = tl.load(norm.weight + column, mask=column < HIDDEN, other=0.0)[None, :]
            values = (values.to(tl.float32) * scale).to(kind) * factor
            to = norm.y + token[:, None] * HIDDEN + column[None, :]
            tl.store(to, values, mask=of_token & inside & (tl.program_id(1) == 0))
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    scores += tl.program_id(2).to(tl.int64) * num_tokens * EXPERTS
    tl.store(scores + token[None, :] * EXPERTS + expert[:, None], acc, mask=tl.trans(of_token) & of_expert)


@jit
def chosen_of(s, number, inside, place, C: tl.constexpr):
    """Return the experts and the weights of one token with scores s, as `reference` does."""
    TOP_K: tl.constexpr = C.TOP_K
    fails = tl.sum((s != s).to(tl.int32), 0) > 0
    most = tl.max(s, 0)
    total = tl.sum(tl.where(inside, tl.exp(s - most), 0.0), 0)
    # Integers that rise with the numbers; of equal ones the lowest expert is taken.
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    rank = tl.where(inside, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -2147483648)
    chosen = place * 0 - 1
    value = place * 0.0
    for j in tl.static_range(TOP_K):
        best = tl.max(rank, 0)
        at = tl.min(tl.where(inside & (rank == best), number, 2147483647), 0)
        inside = inside & (number != at)
        rank = tl.where(number == at, -2147483648, rank)
        chosen = tl.where(place == j, at, chosen)
        bits = tl.where(best < 0, best ^ 0x7FFFFFFF, best)
        value = tl.where(place == j, bits.to(tl.float32, bitcast=True), value)
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
    work_expert, work_first, work_count, work_size, pairs = work
    takes = (chosen >= 0) & (place < C.ALL)
    entry = tl.cumsum(takes.to(tl.int32), 0) - 1
    tl.store(work_expert + entry, chosen, mask=takes)
    tl.store(work_first + entry, entry * 0, mask=takes)
    tl.store(work_count + entry, entry * 0 + 1, mask=takes)
    tl.store(pairs + chosen, place, mask=takes)
    tl.store(work_size, tl.sum(takes.to(tl.int32), 0))
    routed = tl.sum((takes & (place < C.TOP_K)).to(tl.int32), 0)
    add_to_tally(tally, tl.minimum(routed, 1), routed, routed)


@jit
def list_all(work, counters, tally, BLOCK: tl.constexpr, C: tl.constexpr):
    """Make the work list from the pairs of each expert, and leave the counters zero."""
    work_expert, work_first, work_count, work_size, _pairs = work
    number = tl.arange(0, C.EXPERTS_PAD)
    inside = number < C.OWN + C.ALL - C.TOP_K
    count = tl.load(counters + number, mask=inside, other=0, cache_modifier=".cg")
    tl.store(counters + number, 0, mask=inside)
    tl.store(counters + C.OWN + C.ALL - C.TOP_K, 0)
    blocks = (count + BLOCK - 1) // BLOCK
    begin = tl.cumsum(blocks, 0) - blocks
    tl.store(work_size, tl.sum(blocks, 0))
    routed = tl.where(number < C.OWN, count, 0)
    add_to_tally(tally, tl.max(routed, 0), tl.sum((routed > 0).to(tl.int32), 0), tl.sum(routed, 0))
    for block in range(tl.max(blocks, 0)):
        has = blocks > block
        tl.store(work_expert + begin + block, number, mask=has)
        tl.store(work_first + begin + block, number * 0 + block * BLOCK, mask=has)
        tl.store(work_count + begin + block, count, mask=has)


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


@jit
def choose_kernel(
    scores, num_real, experts, weights, work, counters, tally, num_tokens,
    EXPERTS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, IS_ONE: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Choose for one token per program; the last to finish makes the work list. IS_ONE: there is one token.

    counters: int32 [experts + 1], zero before and after: the pairs of each expert, the programs that are done.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    number = tl.arange(0, C.EXPERTS_PAD)
    inside = number < EXPERTS
    is_real = token >= 0
    if num_real is not None:
        is_real = token < tl.load(num_real)
    place = tl.arange(0, C.PLACES_PAD)
    chosen = place * 0 - 1
    value = place * 0.0
    if is_real:
        s = tl.load(scores + token.to(tl.int64) * EXPERTS + number, mask=inside, other=-float("inf"))
        for part in tl.static_range(1, SLICES):
            at = (part * num_tokens + token).to(tl.int64) * EXPERTS + number
            s += tl.load(scores + at, mask=inside, other=0.0)
        chosen, value = chosen_of(s, number, inside, place, C)
    to = token * C.ALL + place
    tl.store(experts + to, chosen, mask=place < C.ALL)
    tl.store(weights + to, value, mask=place < C.ALL)
    if IS_ONE:
        list_one(work, tally, chosen, place, C)
    else:
        takes = (chosen >= 0) & (place < C.ALL)
        expert = tl.maximum(chosen, 0)
        rank = tl.atomic_add(counters + expert, 1, mask=takes, sem="relaxed")
        tl.store(work[4] + expert.to(tl.int64) * num_tokens + rank, to, mask=takes)
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + C.OWN + C.ALL - C.TOP_K, 1, sem="acq_rel")
        if arrived == num_tokens - 1:
            tl.debug_barrier()
            list_all(work, counters, tally, BLOCK, C)


#: Sizes of a program of scores: the same for any number of tokens. The sum is cut into slices of COLUMNS, which are
#: added in order: few programs would take long for one chain.
COLUMNS = 256
SCORES = {"COLUMNS": COLUMNS, "BM": 16, "BE": 16, "num_warps": 4, "num_stages": 2}
#: Of more tokens of 16 bits.
MANY_TOKENS, MANY_SCORES = 256, SCORES | {"BM": 64, "BE": 32}
#: (tokens, pairs of an expert that are multiplied at a time) in rising order; more tokens have the last.
BLOCKS = ((64, 16), (512, 32), (2048, 64))
LARGEST_BLOCK = 128


def step_of(dtype: torch.dtype) -> int:
    """Return the columns of a step of scores."""
    return 128 if dtype.itemsize == 2 else 32


def block_of(num_tokens: int) -> int:
    """Return the pairs of an expert that are multiplied at a time."""
    return next((block for most, block in BLOCKS if num_tokens <= most), LARGEST_BLOCK)


def num_entries(num_pairs: int, num_experts: int, block: int) -> int:
    """Return the most entries of a work list: each expert has at most one that is not full."""
    return min(num_experts, num_pairs) + num_pairs // block


@functools.cache
def _counters(device: torch.device, num_experts: int) -> torch.Tensor:
    return torch.zeros(num_experts + 1, dtype=torch.int32, device=device)


class StreamNorm(NamedTuple):
    """The norm before a router: sums of squares of x (squares.py), weight, eps; y [T, H] is x normalised."""

    partial: torch.Tensor
    weight: torch.Tensor
    eps: float
    y: torch.Tensor


def launch(
    x: torch.Tensor, weight: torch.Tensor, form: RouterForm, num_real: torch.Tensor | None,
    tally: torch.Tensor | None = None, block: int = 0, norm: StreamNorm | None = None,
) -> Routing:  # fmt: skip
    """Return what `reference` returns, with a work list of `block` pairs at a time, by default `block_of`.

    With a norm fill norm.y and route by it.
    """
    if not launches(x):
        return reference(_normalised(x, norm), weight, form, num_real, tally)
    (num_tokens, hidden), num_experts, device = x.shape, weight.shape[0], x.device
    slices, places = cdiv(hidden, COLUMNS), form.top_k + form.num_shared
    scores = torch.empty((slices, num_tokens, num_experts), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, places), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, places), dtype=torch.float32, device=device)
    block, total = block or block_of(num_tokens), (form.num_kept or num_experts) + form.num_shared
    entries = num_entries(num_tokens * places, total, block)
    columns = [torch.empty(entries, dtype=torch.int32, device=device) for _ in range(3)]
    size = torch.empty(1, dtype=torch.int32, device=device)
    work = WorkList(*columns, size, torch.empty((total, num_tokens), dtype=torch.int32, device=device))
    if num_tokens:
        dependent = dependent_launch(device)
        constants = scores_config(num_tokens, num_experts, hidden, x.dtype)
        grid = cdiv(num_tokens, constants["BM"]), cdiv(num_experts, constants["BE"]), slices
        scores_kernel[grid](x, norm, weight, scores, num_tokens, **constants, **dependent)
        choose_kernel[(num_tokens,)](
            scores, num_real, experts, weights, work, _counters(device, total), tally, num_tokens,
            **choose_config(num_experts, form), SLICES=slices, BLOCK=block, IS_ONE=num_tokens == 1, **dependent,
        )  # fmt: skip
    return Routing(experts, weights, work, block)


def _normalised(x: torch.Tensor, norm: StreamNorm | None) -> torch.Tensor:
    return x if norm is None else norm.y.copy_(rms_norm.reference(x, norm.weight, norm.eps))


def scores_config(num_tokens: int, num_experts: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of `scores_kernel`, all but PDL."""
    sizes = {"EXPERTS": num_experts, "HIDDEN": hidden, "LEVELS": squares.levels(hidden)}
    tile = MANY_SCORES if num_tokens > MANY_TOKENS and dtype.itemsize == 2 else SCORES
    return sizes | tile | {"BK": step_of(dtype), "PRECISION": "ieee"}


def choose_config(num_experts: int, form: RouterForm) -> dict[str, Any]:
    """Return the constants of `choose_kernel` that depend on the model."""
    places, own = form.top_k + form.num_shared, form.num_kept or num_experts
    choice = ChoiceForm(
        next_power_of_2(max(num_experts, own + form.num_shared)), own, form.top_k, places, next_power_of_2(places),
        form.is_softmax, form.renormalises, form.scale, form.first_kept, form.num_kept,
    )  # fmt: skip
    return {"EXPERTS": num_experts, "C": choice, "num_warps": 1}
