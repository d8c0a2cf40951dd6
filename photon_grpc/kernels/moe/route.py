"""The experts of each token, and for products of many experts the list of what each is to multiply.

    s = x Wᵀ in float32
    experts: the top_k largest of s, of equal ones the lower numbers, in falling order
    weights: softmax(s) or 1 / (1 + exp(-s)) at those, divided by their sum if the form renormalises, times scale

`tally` int64 [4] counts calls, experts that were reached, pairs of the busiest expert, all pairs.

A token whose numbers hold a NaN has the experts 0 … top_k - 1 and weights NaN: it alone fails. Tokens from num_real on
are padding: their experts are -1, their weights 0.

Shapes: x [T, H], W [E, H], num_real int32 [1] or None -> experts int32 [T, top_k], weights float32 [T, top_k].
Bytes moved: (E + T) · H · itemsize, all else is small.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl


class RouterForm(NamedTuple):
    """The formula of a router. is_softmax: of all experts' numbers; else each has a sigmoid. scale: of the weights.

    first_kept, num_kept (0: all): the experts that stay, numbered from 0; others become -1 with weight 0.
    """

    top_k: int
    is_softmax: bool = True
    renormalises: bool = True
    scale: float = 1.0
    first_kept: int = 0
    num_kept: int = 0


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
    if num_real is not None:
        is_real = (torch.arange(x.shape[0], device=x.device) < num_real)[:, None]
        experts, weights = torch.where(is_real, experts, -1), torch.where(is_real, weights, 0.0)
    if form.num_kept:
        is_kept = (experts >= form.first_kept) & (experts < form.first_kept + form.num_kept)
        experts = torch.where(is_kept, experts - form.first_kept, -1)
        weights = torch.where(is_kept, weights, 0.0)
    if tally is not None:
        counts = torch.bincount(experts.flatten() + 1, minlength=weight.shape[0] + 1)[1:]
        tally += torch.stack(((counts.max() > 0).long(), (counts > 0).sum(), counts.max(), counts.sum()))
    return Routing(experts, weights)


@jit
def scores_kernel(
    x, weight, scores, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write scores [slices, T, E] in float32: BM tokens, BE experts and COLUMNS columns per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    of_token, of_expert = (token < num_tokens)[:, None], (expert < EXPERTS)[:, None]
    acc = tl.zeros([BE, BM], tl.float32)
    for start in range(0, COLUMNS, BK):
        column = tl.program_id(2) * COLUMNS + start + tl.arange(0, BK)
        inside = (column < HIDDEN)[None, :]
        w = tl.load(weight + expert[:, None] * HIDDEN + column[None, :], mask=of_expert & inside, other=0.0)
        values = tl.load(x + token[:, None] * HIDDEN + column[None, :], mask=of_token & inside, other=0.0)
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    scores += tl.program_id(2).to(tl.int64) * num_tokens * EXPERTS
    tl.store(scores + token[None, :] * EXPERTS + expert[:, None], acc, mask=tl.trans(of_token) & of_expert)


@jit
def choose_kernel(
    scores, num_real, experts, weights, work, counters, tally, num_tokens,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr,
    SLICES: tl.constexpr, IS_SOFTMAX: tl.constexpr, RENORMALISES: tl.constexpr, SCALE: tl.constexpr,
    FIRST_KEPT: tl.constexpr, NUM_KEPT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose for one token per program; the last to finish makes the work list.

    counters: int32 [EXPERTS + 1], zero before and after: the pairs of each expert, the programs that are done.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    work_expert, work_first, work_count, work_size, pairs = work
    token = tl.program_id(0)
    number = tl.arange(0, EXPERTS_PAD)
    inside = number < EXPERTS
    is_real = token >= 0
    if num_real is not None:
        is_real = token < tl.load(num_real)
    place = tl.arange(0, TOP_K_PAD)
    chosen = place * 0 - 1
    value = place * 0.0
    if is_real:
        s = tl.load(scores + token.to(tl.int64) * EXPERTS + number, mask=inside, other=-float("inf"))
        for part in tl.static_range(1, SLICES):
            at = (part * num_tokens + token).to(tl.int64) * EXPERTS + number
            s += tl.load(scores + at, mask=inside, other=0.0)
        fails = tl.sum((s != s).to(tl.int32), 0) > 0
        most = tl.max(s, 0)
        total = tl.sum(tl.where(inside, tl.exp(s - most), 0.0), 0)
        # One integer that rises with the number and falls with the expert: its maximum is both.
        bits = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
        rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) * EXPERTS_PAD + (EXPERTS_PAD - 1 - number)
        rank = tl.where(inside, rank, -9223372036854775807)
        for j in tl.static_range(TOP_K):
            best = tl.max(rank, 0)
            bits = (best // EXPERTS_PAD - (best % EXPERTS_PAD < 0).to(tl.int64)).to(tl.int32)
            at = EXPERTS_PAD - 1 - (best & (EXPERTS_PAD - 1)).to(tl.int32)
            rank = tl.where(number == at, -9223372036854775807, rank)
            chosen = tl.where(place == j, at, chosen)
            bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
            value = tl.where(place == j, bits.to(tl.float32, bitcast=True), value)
        chosen = tl.where(fails & (place < TOP_K), place, chosen)
        if IS_SOFTMAX:
            weight = tl.exp(value - most) / total
        else:
            weight = 1.0 / (1.0 + tl.exp(-value))
        weight = tl.where(place < TOP_K, weight, 0.0)
        if RENORMALISES:
            weight = weight / tl.sum(weight, 0)
        value = tl.where(fails, float("nan"), weight * SCALE)
    if NUM_KEPT > 0:
        is_kept = (chosen >= FIRST_KEPT) & (chosen < FIRST_KEPT + NUM_KEPT)
        chosen = tl.where(is_kept, chosen - FIRST_KEPT, -1)
        value = tl.where(is_kept, value, 0.0)
    to = token * TOP_K + place
    tl.store(experts + to, chosen, mask=place < TOP_K)
    tl.store(weights + to, value, mask=place < TOP_K)
    takes = (chosen >= 0) & (place < TOP_K)
    expert = tl.maximum(chosen, 0)
    rank = tl.atomic_add(counters + expert, 1, mask=takes, sem="relaxed")
    tl.store(pairs + expert.to(tl.int64) * num_tokens + rank, to, mask=takes)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + EXPERTS, 1, sem="acq_rel")
    if arrived == num_tokens - 1:
        tl.debug_barrier()
        count = tl.load(counters + number, mask=inside, other=0, cache_modifier=".cg")
        tl.store(counters + number, 0, mask=inside)
        tl.store(counters + EXPERTS, 0)
        blocks = (count + BLOCK - 1) // BLOCK
        begin = tl.cumsum(blocks, 0) - blocks
        tl.store(work_size, tl.sum(blocks, 0))
        if tally is not None:
            most = tl.max(count, 0).to(tl.int64)
            tl.store(tally, tl.load(tally) + tl.minimum(most, 1))
            tl.store(tally + 1, tl.load(tally + 1) + tl.sum((count > 0).to(tl.int64), 0))
            tl.store(tally + 2, tl.load(tally + 2) + most)
            tl.store(tally + 3, tl.load(tally + 3) + tl.sum(count.to(tl.int64), 0))
        for block in range(tl.max(blocks, 0)):
            has = blocks > block
            tl.store(work_expert + begin + block, number, mask=has)
            tl.store(work_first + begin + block, number * 0 + block * BLOCK, mask=has)
            tl.store(work_count + begin + block, count, mask=has)


#: Sizes of a program of scores: the same for any number of tokens. The sum is cut into slices of COLUMNS, which are
#: added in order: few programs would take long for one chain.
COLUMNS = 256
SCORES = {"COLUMNS": COLUMNS, "BM": 16, "BE": 16, "num_warps": 4, "num_stages": 2}
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


def launch(
    x: torch.Tensor, weight: torch.Tensor, form: RouterForm, num_real: torch.Tensor | None,
    tally: torch.Tensor | None = None, block: int = 0,
) -> Routing:  # fmt: skip
    """Return what `reference` returns, with a work list of `block` pairs at a time, by default `block_of`."""
    if not launches(x):
        return reference(x, weight, form, num_real, tally)
    (num_tokens, hidden), num_experts, device = x.shape, weight.shape[0], x.device
    slices = cdiv(hidden, COLUMNS)
    scores = torch.empty((slices, num_tokens, num_experts), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, form.top_k), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, form.top_k), dtype=torch.float32, device=device)
    block = block or block_of(num_tokens)
    entries = num_entries(num_tokens * form.top_k, num_experts, block)
    columns = [torch.empty(entries, dtype=torch.int32, device=device) for _ in range(3)]
    size = torch.empty(1, dtype=torch.int32, device=device)
    work = WorkList(*columns, size, torch.empty((num_experts, num_tokens), dtype=torch.int32, device=device))
    if num_tokens:
        dependent = dependent_launch(device)
        grid = cdiv(num_tokens, SCORES["BM"]), cdiv(num_experts, SCORES["BE"]), slices
        scores_kernel[grid](
            x, weight, scores, num_tokens, EXPERTS=num_experts, HIDDEN=hidden, BK=step_of(x.dtype), PRECISION="ieee",
            **SCORES, **dependent,
        )  # fmt: skip
        choose_kernel[(num_tokens,)](
            scores, num_real, experts, weights, work, _counters(device, num_experts), tally, num_tokens,
            **choose_config(num_experts, form), SLICES=slices, BLOCK=block, **dependent,
        )  # fmt: skip
    return Routing(experts, weights, work, block)


def choose_config(num_experts: int, form: RouterForm) -> dict[str, Any]:
    """Return the constants of `choose_kernel`, all but BLOCK and PDL."""
    return {
        "EXPERTS": num_experts,
        "EXPERTS_PAD": next_power_of_2(num_experts),
        "TOP_K": form.top_k,
        "TOP_K_PAD": next_power_of_2(form.top_k),
        "IS_SOFTMAX": form.is_softmax,
        "RENORMALISES": form.renormalises,
        "SCALE": form.scale,
        "FIRST_KEPT": form.first_kept,
        "NUM_KEPT": form.num_kept,
        "num_warps": 1,
    }
