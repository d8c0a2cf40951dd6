"""The experts of each token, and for products of many experts the list of what each is to multiply.

    s = x Wᵀ in float32
    experts: the top_k largest of s, of equal ones the lower numbers, in falling order
    weights: softmax(s) or 1 / (1 + exp(-s)) at those, divided by their sum if the form renormalises, times scale

With a bias b [E] experts are chosen by p = 1 / (1 + exp(-s)) + b instead, and with groups only from those groups that
have the largest sums of two p; weights are without b.

`tally` int64 [4] counts calls, experts that were reached, pairs of the busiest expert, all pairs.

Behind its own each token has the experts E … E + num_shared - 1, which every token reaches, with weight 1.

A token whose numbers hold a NaN has the experts 0 … top_k - 1 and weights NaN: it alone fails. Tokens from num_real on
are padding: their experts are -1, their weights 0.

Shapes: x [T, H], W [E, H], num_real int32 [1] or None -> experts int32 [T, top_k + num_shared], weights float32 of that
shape. With a norm x is normalised first, as `rms_norm.py` does; of few tokens programs beside those of scores can also
leave it in 8 bits, as `quantize.py` does.
Bytes moved: (E + T) · H · itemsize, all else is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels import rms_norm
from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import tree_sum
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, counters_of, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.linear.quantize import GROUP, QuantizedRows, quantized, scales_of
from photon_grpc.kernels.moe.choose import ChoiceForm, choose_kernel, choose_token, list_one
from photon_grpc.kernels.moe.products import RowOperand


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
    #: Of neighbouring experts; 0: none. A token chooses from `groups_taken` of them.
    groups: int = 0
    groups_taken: int = 0
    first_kept: int = 0
    num_kept: int = 0
    num_shared: int = 0


class WorkList(NamedTuple):
    """The products of experts: entry i is the pairs `first[i]` to `min(first[i] + block, count[i])` of `expert[i]`.

    expert, first, count: int32 [entries]; size: int32 [1], the entries in use. pairs: int32 [E, T], of each expert its
    token · top_k + place in any order. row: int32 [entries], the pairs of all entries before.
    """

    expert: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    size: torch.Tensor
    pairs: torch.Tensor
    row: torch.Tensor


class Routing(NamedTuple):
    """The experts and weights of T tokens; work: for products of many experts, `block` pairs at a time."""

    experts: torch.Tensor
    weights: torch.Tensor
    work: WorkList | None = None
    block: int = 0


def reference(
    x: torch.Tensor, weight: torch.Tensor, form: RouterForm, num_real: torch.Tensor | None,
    tally: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, block: int = 0,
) -> Routing:  # fmt: skip
    """Route in torch, without a work list; add to the tally."""
    # In float64 and rounded once, so that a token has nearly always the same experts and weights in any company.
    scores = (x.double() @ weight.double().t()).float()
    sigmoid = scores.double().sigmoid().float()
    preferred = scores if bias is None else _of_groups(sigmoid + bias.float(), form)
    chosen = preferred.sort(dim=-1, descending=True, stable=True).indices[:, : form.top_k]
    weights = (scores.softmax(-1) if form.is_softmax else sigmoid).gather(1, chosen)
    weights = (weights / weights.sum(-1, keepdim=True) if form.renormalises else weights) * form.scale
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


def _of_groups(preferred: torch.Tensor, form: RouterForm) -> torch.Tensor:
    """Return [T, E] with -inf for the experts of groups that are not taken."""
    if not form.groups:
        return preferred
    groups = preferred.unflatten(-1, (form.groups, -1))
    order = groups.topk(2, dim=-1).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    is_out = torch.ones_like(order, dtype=torch.bool).scatter_(1, order[:, : form.groups_taken], value=False)
    return groups.masked_fill(is_out[:, :, None], -torch.inf).flatten(1)


@jit
def store_scores(
    x, norm, weight, scores, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write scores [slices, T, E] in float32: BM tokens, BE experts and COLUMNS columns per program.

    norm: a StreamNorm, whose normalised x is stored, or None. TOKENS: the rows of x that are read: BM, or of a single
    token 1. The next kernel may begin at once. Weights are read before the wait.
    """
    IS_WHOLE: tl.constexpr = BK == COLUMNS
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * BE + tl.arange(0, BE)
    of_token, of_expert = (token < num_tokens)[:, None], (expert < EXPERTS)[:, None]
    acc = tl.zeros([BE, BM], tl.float32)
    if IS_WHOLE:
        column = tl.program_id(2) * COLUMNS + tl.arange(0, BK)
        at = weight + expert[:, None] * HIDDEN + column[None, :]
        w = tl.load(at, mask=of_expert & (column < HIDDEN)[None, :], other=0.0)
        if norm is not None:
            factor = tl.load(norm.weight + column, mask=column < HIDDEN, other=0.0)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if norm is not None:
        group = tl.arange(0, 2**LEVELS)
        at = norm.partial + token[:, None] * (HIDDEN // 16) + group[None, :]
        sums = tl.load(at, mask=of_token & (group < HIDDEN // 16)[None, :], other=0.0)
        scale = tl.rsqrt(tree_sum(sums) / HIDDEN + norm.eps)[:, None]
    for start in range(0, COLUMNS, BK):
        column = tl.program_id(2) * COLUMNS + start + tl.arange(0, BK)
        inside = (column < HIDDEN)[None, :]
        if not IS_WHOLE:
            w = tl.load(weight + expert[:, None] * HIDDEN + column[None, :], mask=of_expert & inside, other=0.0)
        values = tl.load(x + token[:, None] * HIDDEN + column[None, :], mask=of_token & inside, other=0.0)
        if norm is not None:
            kind: tl.constexpr = values.dtype
            if not IS_WHOLE:
                factor = tl.load(norm.weight + column, mask=column < HIDDEN, other=0.0)[None, :]
            values = (values.to(tl.float32) * scale).to(kind) * factor
            to = norm.y + token[:, None] * HIDDEN + column[None, :]
            tl.store(to, values, mask=of_token & inside & (tl.program_id(1) == 0))
        if TOKENS < BM:
            values = tl.where(tl.arange(0, BM)[:, None] < TOKENS, values, tl.zeros([BM, BK], values.dtype))
        acc = tl.dot(w, tl.trans(values), acc, input_precision=PRECISION)
    token = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    of_token = (token < num_tokens)[:, None]
    scores += tl.program_id(2).to(tl.int64) * num_tokens * EXPERTS
    tl.store(scores + token[None, :] * EXPERTS + expert[:, None], acc, mask=tl.trans(of_token) & of_expert)


@jit
def store_rows(
    x, norm, rows, num_tokens, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write rows of x, normalised, in 8 bits, with a scale of WIDTH columns: every so many of BM tokens per program."""
    numbers, scales, stride = rows
    KIND: tl.constexpr = numbers.dtype.element_ty
    LIMIT: tl.constexpr = 127.0 if KIND.is_int() else 448.0
    number = tl.arange(0, 16 * 2**LEVELS // WIDTH)
    column = number[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    group = tl.arange(0, 2**LEVELS)
    factor = tl.load(norm.weight + column, mask=column < HIDDEN, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for place in range(tl.program_id(2), BM, tl.num_programs(2)):
        token = tl.program_id(0).to(tl.int64) * BM + place
        if token < num_tokens:
            at = norm.partial + token * (HIDDEN // 16) + group
            sums = tl.load(at, mask=group < HIDDEN // 16, other=0.0)
            scale = tl.rsqrt(tl.sum(tree_sum(tl.reshape(sums, [1, 2**LEVELS])), 0) / HIDDEN + norm.eps)
            values = tl.load(x + token * HIDDEN + column, mask=column < HIDDEN, other=0.0)
            tile = ((values.to(tl.float32) * scale).to(values.dtype) * factor).to(tl.float32)
            of_row = scales_of(tile, LIMIT)
            tl.store(numbers + token * HIDDEN + column, quantized(tile, of_row, KIND), mask=column < HIDDEN)
            tl.store(scales + token + number * stride, of_row, mask=number * WIDTH < HIDDEN)


@jit
def store_scores_or_rows(
    x, norm, rows, weight, scores, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write scores, or behind the programs of all experts rows, if there is memory for them: WIDTH is not 0."""
    if WIDTH > 0 and tl.program_id(1) == (EXPERTS + BE - 1) // BE:
        store_rows(x, norm, rows, num_tokens, HIDDEN, LEVELS, BM, WIDTH, PDL)
    else:
        store_scores(
            x, norm, weight, scores, num_tokens, EXPERTS, HIDDEN, LEVELS, COLUMNS, BM, BE, BK, PRECISION, TOKENS, PDL
        )


@jit
def scores_kernel(
    x, norm, rows, weight, scores, num_tokens,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write scores, and rows if there is memory for them."""
    store_scores_or_rows(
        x, norm, rows, weight, scores, num_tokens, EXPERTS, HIDDEN, LEVELS, COLUMNS, BM, BE, BK, PRECISION, BM, WIDTH,
        PDL,
    )  # fmt: skip


@jit
def route_one_kernel(
    x, norm, rows, weight, scores, bias, num_real, experts, weights, work, counter, tally,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, SLICES: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the scores of one token; of their programs the last to finish chooses.

    It has one warp, as `choose_kernel` has, so that numbers are added in the same order. counter: int32, zero before
    and after.
    """
    store_scores_or_rows(
        x, norm, rows, weight, scores, 1, EXPERTS, HIDDEN, LEVELS, COLUMNS, BM, BE, BK, PRECISION, 1, WIDTH, PDL
    )
    of_experts = (EXPERTS + BE - 1) // BE
    if tl.program_id(1) < of_experts:
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == of_experts * tl.num_programs(2) - 1:
            tl.store(counter, 0)
            chosen, place = choose_token(
                scores, bias, num_real, experts, weights, tl.program_id(0), 1, EXPERTS, SLICES, C
            )  # fmt: skip
            list_one(work, tally, chosen, place, C)


#: Sizes of a program of scores: the same for any number of tokens. The sum is cut into slices of COLUMNS, which are
#: added in order: few programs would take long for one chain.
COLUMNS = 256
SCORES = {"COLUMNS": COLUMNS, "BM": 16, "BE": 16, "num_warps": 4, "num_stages": 2}
#: Of few tokens of 16 bits, where all that a program reads is under way at once, and of more.
FEW_SCORES = SCORES | {"BK": COLUMNS}
MANY_TOKENS, MANY_SCORES = 256, SCORES | {"BM": 64, "BE": 32}
#: (tokens, pairs of an expert that are multiplied at a time) in rising order; more tokens have the last.
BLOCKS = ((64, 16), (512, 32), (2048, 64))
LARGEST_BLOCK = 128
#: Columns of a row that one warp holds.
MOST_COLUMNS = 4096


def step_of(dtype: torch.dtype) -> int:
    """Return the columns of a step of scores."""
    return 128 if dtype.itemsize == 2 else 32


def block_of(num_tokens: int) -> int:
    """Return the pairs of an expert that are multiplied at a time."""
    return next((block for most, block in BLOCKS if num_tokens <= most), LARGEST_BLOCK)


def num_entries(num_pairs: int, num_experts: int, block: int) -> int:
    """Return the most entries of a work list: each expert has at most one that is not full."""
    return min(num_experts, num_pairs) + num_pairs // block


class StreamNorm(NamedTuple):
    """The norm before a router: sums of squares of x (squares.py), weight, eps; y [T, H] is x normalised."""

    partial: torch.Tensor
    weight: torch.Tensor
    eps: float
    y: torch.Tensor


def takes_rows(x: torch.Tensor) -> bool:
    """Return whether a router can leave x in 8 bits: one warp holds a row, and few tokens need few more programs."""
    return launches(x) and x.shape[0] <= MANY_TOKENS and x.shape[1] <= MOST_COLUMNS and x.dtype.itemsize == 2


def launch(
    x: torch.Tensor, weight: torch.Tensor, form: RouterForm, num_real: torch.Tensor | None,
    tally: torch.Tensor | None = None, bias: torch.Tensor | None = None, *,
    block: int = 0, norm: StreamNorm | None = None, rows: QuantizedRows | None = None,
) -> Routing:  # fmt: skip
    """Return what `reference` returns, with a work list of `block` pairs at a time, by default `block_of`.

    With a norm fill norm.y, and of what `takes_rows` takes also `rows`, and route by it.
    """
    if not launches(x):
        return reference(_normalised(x, norm), weight, form, num_real, tally, bias)
    (num_tokens, hidden), num_experts, device = x.shape, weight.shape[0], x.device
    slices, places = cdiv(hidden, COLUMNS), form.top_k + form.num_shared
    scores = torch.empty((slices, num_tokens, num_experts), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, places), dtype=torch.int32, device=device)
    weights = torch.empty((num_tokens, places), dtype=torch.float32, device=device)
    block, total = block or block_of(num_tokens), (form.num_kept or num_experts) + form.num_shared
    entries = num_entries(num_tokens * places, total, block)
    *columns, row = (torch.empty(entries, dtype=torch.int32, device=device) for _ in range(4))
    size = torch.empty(1, dtype=torch.int32, device=device)
    work = WorkList(*columns, size, torch.empty((total, num_tokens), dtype=torch.int32, device=device), row)
    if num_tokens:
        dependent = dependent_launch(device)
        constants = scores_config(num_tokens, num_experts, hidden, x.dtype)
        constants |= {"WIDTH": 0 if rows is None else width_of(hidden, has_groups=rows.stride > 0)}
        grid = cdiv(num_tokens, constants["BM"]), cdiv(num_experts, constants["BE"]) + (rows is not None), slices
        to = None if rows is None else RowOperand(rows.values, rows.scales, rows.stride)
        choice, counters = choice_of(num_experts, form), counters_of(weight, total + 1)
        if num_tokens == 1:
            route_one_kernel[grid](
                x, norm, to, weight, scores, bias, num_real, experts, weights, work, counters, tally, **constants,
                SLICES=slices, C=choice, **dependent,
            )  # fmt: skip
        else:
            scores_kernel[grid](x, norm, to, weight, scores, num_tokens, **constants, **dependent)
            choose_kernel[(num_tokens,)](
                scores, bias, num_real, experts, weights, work, counters, tally, num_tokens, EXPERTS=num_experts,
                SLICES=slices, BLOCK=block, C=choice, num_warps=1, **dependent,
            )  # fmt: skip
    return Routing(experts, weights, work, block)


def _normalised(x: torch.Tensor, norm: StreamNorm | None) -> torch.Tensor:
    return x if norm is None else norm.y.copy_(rms_norm.reference(x, norm.weight, norm.eps))


def scores_config(num_tokens: int, num_experts: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of `scores_kernel`, all but WIDTH and PDL."""
    sizes = {"EXPERTS": num_experts, "HIDDEN": hidden, "LEVELS": squares.levels(hidden)}
    tile = SCORES
    if dtype.itemsize == 2:
        tile = MANY_SCORES if num_tokens > MANY_TOKENS else FEW_SCORES
    one_warp = {"num_warps": 1} if num_tokens == 1 else {}
    return sizes | {"BK": step_of(dtype)} | tile | one_warp | {"PRECISION": "ieee"}


def width_of(hidden: int, *, has_groups: bool) -> int:
    """Return the columns that share a scale, of rows padded to a power of two."""
    padded = squares.GROUP * next_power_of_2(hidden // squares.GROUP)
    return min(GROUP, padded) if has_groups else padded


def choice_of(num_experts: int, form: RouterForm) -> ChoiceForm:
    """Return the constants of a choice."""
    places, own = form.top_k + form.num_shared, form.num_kept or num_experts
    return ChoiceForm(
        next_power_of_2(max(num_experts, own + form.num_shared)), own, form.top_k, places, next_power_of_2(places),
        form.is_softmax, form.renormalises, form.scale, form.first_kept, form.num_kept,
        form.groups, form.groups_taken, next_power_of_2(max(1, form.groups)), num_experts // max(1, form.groups),
    )  # fmt: skip
