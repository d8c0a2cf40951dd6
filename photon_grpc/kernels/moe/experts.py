"""The feed-forward of all experts at once: two products over the work list of `route.py`, and the sum of each token.

    y[pair] = silu(gate_e(x)) · up_e(x)       e the expert of the pair, x its token's
    z[pair] = down_e(y[pair])                 in float32
    out[token] = Σ_j w_j · z[token · top_k + j], j rising, in float32, rounded once

An expert's rows are gathered through its pairs and written to theirs, so neither x nor y is moved. The grid is that of
the most entries that T tokens can have: it is fixed in a graph, and programs beyond the list leave. K is one chain of
products whatever the tile, so a row has the same bits at any number of tokens.

Shapes: x [T, H], Stacks, Routing -> [T, H]. bf16, fp16, fp32; sums in float32.
Bytes moved: the weights of the experts that are reached, once for every `block` of their pairs.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.formulas import silu_product
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, tl
from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.stacks import Stacks


def reference(x: torch.Tensor, routing: Routing, stacks: Stacks) -> torch.Tensor:
    """Return the sum of each token's experts in torch."""
    parts = torch.zeros((*routing.experts.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for number in range(stacks.gate_up.shape[0]):
        token, place = (routing.experts == number).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ stacks.gate_up.values[number].float().t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        parts[token, place] = y.float() @ stacks.down.values[number].float().t()
    return (parts * routing.weights[:, :, None]).sum(1).to(x.dtype)


@jit
def gate_up_kernel(
    x, weight, y, work, num_tokens, SIZE: tl.constexpr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write y [pairs, SIZE]: BN of its columns for BM pairs of one expert per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    work_expert, work_first, work_count, work_size, pairs = work
    entry = tl.program_id(1)
    if entry < tl.load(work_size):
        expert = tl.load(work_expert + entry).to(tl.int64)
        place = tl.load(work_first + entry) + tl.arange(0, BM)
        has = place < tl.load(work_count + entry)
        pair = tl.load(pairs + expert * num_tokens + place, mask=has, other=0).to(tl.int64)
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        of_w = weight + expert * (2 * SIZE * HIDDEN) + row[:, None] * HIDDEN
        of_x = x + (pair // TOP_K)[:, None] * HIDDEN
        in_w, in_x = (row < SIZE)[:, None], has[:, None]
        gate, up = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
        for start in range(0, HIDDEN, BK):
            column = (start + tl.arange(0, BK))[None, :]
            inside = column < HIDDEN
            values = tl.trans(tl.load(of_x + column, mask=in_x & inside, other=0.0))
            w = tl.load(of_w + column, mask=in_w & inside, other=0.0)
            gate = tl.dot(w, values, gate, input_precision=PRECISION)
            w = tl.load(of_w + SIZE * HIDDEN + column, mask=in_w & inside, other=0.0)
            up = tl.dot(w, values, up, input_precision=PRECISION)
        to = y + pair[None, :] * SIZE + row[:, None]
        tl.store(to, silu_product(gate, up).to(y.dtype.element_ty), mask=has[None, :] & in_w)


@jit
def down_kernel(
    y, weight, z, work, num_tokens, SIZE: tl.constexpr, HIDDEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write z [pairs, HIDDEN] in float32: BN of its columns for BM pairs of one expert per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    work_expert, work_first, work_count, work_size, pairs = work
    entry = tl.program_id(1)
    if entry < tl.load(work_size):
        expert = tl.load(work_expert + entry).to(tl.int64)
        place = tl.load(work_first + entry) + tl.arange(0, BM)
        has = place < tl.load(work_count + entry)
        pair = tl.load(pairs + expert * num_tokens + place, mask=has, other=0).to(tl.int64)
        row = tl.program_id(0) * BN + tl.arange(0, BN)
        of_w = weight + expert * (HIDDEN * SIZE) + row[:, None] * SIZE
        of_y = y + pair[:, None] * SIZE
        in_w, in_y = (row < HIDDEN)[:, None], has[:, None]
        acc = tl.zeros([BN, BM], tl.float32)
        for start in range(0, SIZE, BK):
            column = (start + tl.arange(0, BK))[None, :]
            inside = column < SIZE
            values = tl.trans(tl.load(of_y + column, mask=in_y & inside, other=0.0))
            w = tl.load(of_w + column, mask=in_w & inside, other=0.0)
            acc = tl.dot(w, values, acc, input_precision=PRECISION)
        tl.store(z + pair[None, :] * HIDDEN + row[:, None], acc, mask=has[None, :] & in_w)


@jit
def sum_kernel(
    z, experts, weights, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Write out [T, HIDDEN]: BLOCK columns of one token per program; zeros for padding."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        has = inside & (tl.load(experts + pair) >= 0)
        value = tl.load(z + pair * HIDDEN + column, mask=has, other=0.0)
        total = tl.fma(value, tl.load(weights + pair), total)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)


#: Pairs at a time -> sizes of a program of gate and up, and of down; 16 bits.
TILES: dict[int, tuple[dict[str, int], dict[str, int]]] = {
    16: (
        {"BN": 16, "BK": 128, "num_warps": 4, "num_stages": 4},
        {"BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4},
    ),
    32: (
        {"BN": 32, "BK": 128, "num_warps": 4, "num_stages": 4},
        {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4},
    ),
    64: (
        {"BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4},
        {"BN": 128, "BK": 64, "num_warps": 4, "num_stages": 4},
    ),
    128: (
        {"BN": 64, "BK": 64, "num_warps": 8, "num_stages": 4},
        {"BN": 128, "BK": 64, "num_warps": 8, "num_stages": 4},
    ),
}
#: The same of float32.
WIDE_TILE = {"BN": 32, "BK": 32, "num_warps": 4, "num_stages": 2}


def tiles_of(block: int, itemsize: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of programs for `block` pairs at a time."""
    return TILES[block] if itemsize == 2 else (WIDE_TILE, WIDE_TILE)


def launch(x: torch.Tensor, routing: Routing, stacks: Stacks) -> torch.Tensor:
    """Return what `reference` returns."""
    work = routing.work
    if work is None or not launches(x):
        return reference(x, routing, stacks)
    (num_tokens, hidden), size, top_k = x.shape, stacks.down.shape[2], routing.experts.shape[1]
    num_pairs, entries = num_tokens * top_k, work.expert.shape[0]
    y = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    z = torch.empty((num_pairs, hidden), dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    first, second = tiles_of(routing.block, x.element_size())
    shape: dict[str, Any] = {"SIZE": size, "HIDDEN": hidden, "BM": routing.block, "PRECISION": "ieee"}
    shape |= dependent_launch(x.device)
    gate_up_kernel[(cdiv(size, first["BN"]), entries)](
        x, stacks.gate_up.values, y, work, num_tokens, TOP_K=top_k, **shape, **first
    )
    down_kernel[(cdiv(hidden, second["BN"]), entries)](y, stacks.down.values, z, work, num_tokens, **shape, **second)
    block = 1024
    sum_kernel[(num_tokens, cdiv(hidden, block))](
        z, routing.experts, routing.weights, out, HIDDEN=hidden, TOP_K=top_k, BLOCK=block, num_warps=4,
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
