"""The feed-forward of all experts at once: two products over the work list of `route.py`, and the sum of each token.

    y[pair] = silu(gate_e(x)) · up_e(x)       e the expert of the pair, x its token's
    z[pair] = down_e(y[pair])                 in float32
    out[token] = Σ_j w_j · z[token · top_k + j], j rising, in float32, rounded once; or added to the residual stream

An expert's rows are gathered through its pairs and written to theirs, so neither x nor y is moved. The grid is that of
the most entries that T tokens can have: it is fixed in a graph, and programs beyond the list leave. K is one chain of
products whatever the tile, so a row has the same bits at any number of tokens.

Many tokens of 16 bits are multiplied by `segments.py` and `segments8.py`, with the same bits.

Stacks have any form of `stacks.py`; by activations of 8 bits x and y are quantized before they are multiplied, x of few
tokens by the router.

Shapes: x [T, H], Stacks, Routing -> [T, H]. bf16, fp16, fp32; sums in float32.
Bytes moved: the weights of the experts that are reached, once for every `block` of their pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang import squares
from photon_grpc.kernels.lang.formulas import silu_product
from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, counters_of, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.lang.squares import group_sums
from photon_grpc.kernels.linear import library8, quantize
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.linear.quantize import QuantizedRows
from photon_grpc.kernels.moe import down_alone, route, segments
from photon_grpc.kernels.moe.products import RowOperand, StackOperand, expert_product
from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.stacks import Stack, Stacks


def reference(x: torch.Tensor, routing: Routing, stacks: Stacks, stream: ResidualStream | None = None) -> torch.Tensor:
    """Return the sum of each token's experts in torch, or add it to the stream and return that."""
    parts = torch.zeros((*routing.experts.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for number in range(stacks.gate_up.shape[0]):
        token, place = (routing.experts == number).nonzero(as_tuple=True)
        gate, up = _product(x[token], stacks.gate_up, number).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        parts[token, place] = _product(y, stacks.down, number)
    out = (parts * routing.weights[:, :, None]).sum(1).to(x.dtype)
    if stream is None:
        return out
    stream.h.add_(out)
    stream.partial.copy_(squares.reference(stream.h))
    return stream.h


def _product(x: torch.Tensor, stack: Stack, number: int) -> torch.Tensor:
    """Return the product of rows with the weight of one expert, in float32."""
    if not stack.is_eight:
        return x.float() @ stack.matrix(number).float().t()
    weight = stack.at(number)
    rows = quantize.reference(x, weight.values.dtype, grouped=stack.has_blocks)
    return library8.reference(rows, weight.values, weight.scales)


@jit
def entry_of(work):
    """Return this program's entry of the list, read before it is known to be there: whether, expert, pairs' places."""
    entry = tl.program_id(1)
    expert = tl.load(work[0] + entry, cache_modifier=".cg").to(tl.int64)
    first = tl.load(work[1] + entry, cache_modifier=".cg")
    count = tl.load(work[2] + entry, cache_modifier=".cg")
    return entry < tl.load(work[3], cache_modifier=".cg"), expert, first, count


@jit
def pairs_of(work, is_there, expert, first, count, num_tokens, BM: tl.constexpr):
    """Return the pairs [BM] of an entry, and which of them there are: none if the entry is not there."""
    place = first + tl.arange(0, BM)
    has = (place < count) & is_there
    pair = tl.load(work[4] + expert * num_tokens + place, mask=has, other=0, cache_modifier=".cg")
    return pair.to(tl.int64), has


@jit
def gate_up_kernel(
    x, weight, y, work, num_tokens, SIZE: tl.constexpr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    IS_ONE: tl.constexpr,
):  # fmt: skip
    """Write y [pairs, SIZE]: BN of its columns for BM pairs of one expert per program.

    IS_ONE: there is one token, whose row is known before its pairs are.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    is_there, expert, first, count = entry_of(work)
    if is_there:
        pair, has = pairs_of(work, is_there, expert, first, count, num_tokens, BM)
        # Gate's rows of W, then up's.
        number = tl.arange(0, 2 * BN)
        column = tl.program_id(0) * BN + number % BN
        row, in_w = column + number // BN * SIZE, (column < SIZE)[:, None]
        token = tl.zeros_like(pair) if IS_ONE else pair // TOP_K
        acc = expert_product(
            x, token, has, weight, expert, row, in_w, 2 * SIZE, HIDDEN, BITS, GROUP, EIGHT, BK, PRECISION
        )
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BN, BM]), [1, 2, 0]))
        column = tl.program_id(0) * BN + tl.arange(0, BN)
        to = y + pair[None, :] * SIZE + column[:, None]
        tl.store(to, silu_product(gate, up).to(y.dtype.element_ty), mask=has[None, :] & (column < SIZE)[:, None])


@jit
def add_experts(
    z, experts, weights, out, partial, token, column, real, HIDDEN: tl.constexpr, TOP_K: tl.constexpr
):  # fmt: skip
    """Write out for tokens [T] and neighbouring columns [B], as `sum_kernel` does; real [T]: which tokens there are."""
    BLOCK: tl.constexpr = column.shape[0]
    TOKENS: tl.constexpr = token.shape[0]
    row = token.to(tl.int64)
    inside = real[:, None] & (column < HIDDEN)[None, :]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        has = inside & (tl.load(experts + pair, mask=real, other=-1) >= 0)[:, None]
        value = tl.load(z + pair[:, None] * HIDDEN + column[None, :], mask=has, other=0.0, cache_modifier=".cg")
        weight = tl.load(weights + pair, mask=real, other=0.0)[:, None] + tl.zeros_like(value)
        total = tl.fma(value, weight, total)
    rounded = total.to(out.dtype.element_ty)
    to = out + row[:, None] * HIDDEN + column[None, :]
    if partial is not None:
        h = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        rounded = (rounded.to(tl.float32) + h).to(out.dtype.element_ty)
        stored = tl.where(inside, rounded.to(tl.float32), 0.0)
        sums = group_sums(tl.reshape(stored * stored, [TOKENS * BLOCK]))
        group = tl.min(column, 0) // 16 + tl.arange(0, BLOCK // 16)
        at = partial + row[:, None] * (HIDDEN // 16) + group[None, :]
        in_row = real[:, None] & (group < HIDDEN // 16)[None, :]
        tl.store(at, tl.reshape(sums, [TOKENS, BLOCK // 16]), mask=in_row)
    tl.store(to, rounded, mask=inside)


@jit
def down_kernel(
    y, weight, z, work, num_tokens, stream, SIZE: tl.constexpr, HIDDEN: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, EIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    TOP_K: tl.constexpr = 0, TOKENS: tl.constexpr = 0,
):  # fmt: skip
    """Write z [pairs, HIDDEN] in float32: BN of its columns for BM pairs of one expert per program.

    The list was complete before the kernel before began. With a `stream` of up to TOKENS tokens, an ExpertStream, the
    last entry's program of a column adds the sums of tokens as `sum_kernel` does.
    """
    is_there, expert, first, count = entry_of(work)
    pair, has = pairs_of(work, is_there, expert, first, count, num_tokens, BM)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    in_w = (row < HIDDEN)[:, None]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if is_there:
        acc = expert_product(y, pair, has, weight, expert, row, in_w, HIDDEN, SIZE, BITS, GROUP, EIGHT, BK, PRECISION)
        tl.store(z + pair[None, :] * HIDDEN + row[:, None], acc, mask=has[None, :] & in_w)
        if stream is not None:
            tl.debug_barrier()
            arrived = tl.atomic_add(stream.counters + tl.program_id(0), 1, sem="acq_rel")
            if arrived == tl.load(work[3], cache_modifier=".cg") - 1:
                tl.store(stream.counters + tl.program_id(0), 0)
                token = tl.arange(0, TOKENS)
                add_experts(
                    z, stream.experts, stream.weights, stream.h, stream.partial, token, row, token < num_tokens,
                    HIDDEN, TOP_K,
                )  # fmt: skip


@jit
def sum_kernel(
    z, experts, weights, out, partial,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write out [T, HIDDEN]: BLOCK columns of one token per program; zeros for padding.

    With partial [T, HIDDEN / 16] add to out, the sum rounded first, and leave the sums of squares of `squares.py`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    add_experts(z, experts, weights, out, partial, token, column, token >= 0, HIDDEN, TOP_K)


class ExpertStream(NamedTuple):
    """The stream that sums of few tokens are added to, with their experts and weights.

    counters: int32, one for BN columns, zero before and after.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    h: torch.Tensor
    partial: torch.Tensor
    counters: torch.Tensor


#: A product over a work list: of rows, the routing and a stack.
Product = Callable[[torch.Tensor, Routing, Stack], torch.Tensor]


class ProductTile(NamedTuple):
    """The sizes of a program: BN rows of W (of gate and up each), BK columns a step, warps, steps in flight."""

    BN: int
    BK: int
    num_warps: int = 4
    num_stages: int = 4


#: Pairs at a time -> tiles of gate and up, and of down, of activations of 16 bits.
TILES: dict[int, tuple[ProductTile, ProductTile]] = {
    16: (ProductTile(32, 128), ProductTile(64, 128)),
    32: (ProductTile(32, 128, 4, 3), ProductTile(64, 128, 4, 3)),
    64: (ProductTile(64, 64, 4, 3), ProductTile(128, 64, 4, 3)),
    128: (ProductTile(64, 64, 8), ProductTile(128, 64, 8)),
}
#: The same of packed weights. Groups of columns with a scale are steps or parts of them.
PACKED_TILES = {
    16: (ProductTile(32, 128), ProductTile(64, 128)),
    32: (ProductTile(32, 128), ProductTile(64, 128)),
    64: (ProductTile(32, 128, 4, 3), ProductTile(64, 128, 4, 3)),
    128: (ProductTile(32, 128, 4, 3), ProductTile(64, 128, 4, 3)),
}
#: Of activations of 8 bits: steps of 128 columns, and 64 rows of W, so that every tile's products are those of wgmma.
EIGHT_TILES = {
    16: (ProductTile(32, 128), ProductTile(64, 128)),
    32: (ProductTile(32, 128), ProductTile(64, 128)),
    64: (ProductTile(32, 128), ProductTile(64, 128)),
    128: (ProductTile(32, 128, 4, 3), ProductTile(64, 128, 4, 3)),
}
#: Sums of so many tokens are added by the product that makes their last part.
FEW_TOKENS = 16
#: Of float32 activations.
WIDE_TILE = ProductTile(32, 32, 4, 2)


def tiles_of(block: int, itemsize: int, stack: Stack) -> tuple[ProductTile, ProductTile]:
    """Return the tiles for `block` pairs at a time and activations of `itemsize` bytes."""
    if stack.is_eight:
        return EIGHT_TILES[block]
    if itemsize == 4:
        return WIDE_TILE, WIDE_TILE
    return (TILES if stack.kind.BITS == 16 else PACKED_TILES)[block]


def config(block: int, itemsize: int, stack: Stack, *, of_down: bool) -> dict[str, Any]:
    """Return the compile-time arguments of a product, all but the sizes of W and PDL."""
    eight = 0 if not stack.is_eight else 2 if stack.has_blocks else 1
    form = {"BITS": stack.kind.BITS, "GROUP": stack.kind.GROUP, "EIGHT": eight, "BM": block, "PRECISION": "ieee"}
    return form | tiles_of(block, itemsize, stack)[of_down]._asdict()


def operand_of(stack: Stack) -> StackOperand:
    return StackOperand(stack.values, stack.scales, stack.zeros)


def rows_of(x: torch.Tensor, stack: Stack) -> RowOperand:
    """Return rows as the kernels multiply them by this stack."""
    if not stack.is_eight:
        return RowOperand(x)
    return quantized_operand(quantize.launch(x, stack.values.dtype, grouped=stack.has_blocks))


def quantized_operand(rows: QuantizedRows) -> RowOperand:
    return RowOperand(rows.values, rows.scales, rows.stride)


def memory_for(x: torch.Tensor, block: int, stacks: Stacks) -> QuantizedRows | None:
    """Return rows that a router is to fill with x, normalised, for gate and up; None: it leaves x as it is.

    block: as of `block_of`: `segments.py` takes x as it is.
    """
    stack = stacks.gate_up
    if block or not stack.is_eight or not route.takes_rows(x):
        return None
    return quantize.memory_for(x, stack.values.dtype, grouped=stack.has_blocks)


def gate_up_launch(
    x: torch.Tensor, routing: Routing, stack: Stack, tile: ProductTile | None = None,
    rows: QuantizedRows | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return y [pairs, I]; rows of pairs that reach no expert are undefined. rows: x quantized, if it is already."""
    (num_tokens, top_k), (_, rows_of_w, hidden) = routing.experts.shape, stack.shape
    size = rows_of_w // 2
    y = torch.empty((num_tokens * top_k, size), dtype=x.dtype, device=x.device)
    meta = _meta(x, routing, stack, tile, of_down=False) | {"IS_ONE": num_tokens == 1}
    of_x = rows_of(x, stack) if rows is None else quantized_operand(rows)
    gate_up_kernel[(cdiv(size, meta["BN"]), num_entries(routing))](
        of_x, operand_of(stack), y, routing.work, num_tokens, SIZE=size, HIDDEN=hidden, TOP_K=top_k, **meta
    )
    return y


def down_launch(
    y: torch.Tensor, routing: Routing, stack: Stack, tile: ProductTile | None = None,
    stream: ResidualStream | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return z [pairs, H] in float32; rows of pairs that reach no expert are undefined.

    With a stream, of at most FEW_TOKENS, add the sums of tokens to it as `sum_launch` does.
    """
    (num_tokens, top_k), (_, hidden, size) = routing.experts.shape, stack.shape
    z = torch.empty((y.shape[0], hidden), dtype=torch.float32, device=y.device)
    meta, added = _meta(y, routing, stack, tile, of_down=True), None
    columns = cdiv(hidden, meta["BN"])
    if stream is not None:
        meta |= {"TOP_K": top_k, "TOKENS": next_power_of_2(num_tokens)}
        added = ExpertStream(routing.experts, routing.weights, *stream, counters_of(stack.values, columns))
    down_kernel[(columns, num_entries(routing))](
        rows_of(y, stack), operand_of(stack), z, routing.work, num_tokens, added, SIZE=size, HIDDEN=hidden, **meta
    )
    return z


def _meta(
    x: torch.Tensor, routing: Routing, stack: Stack, tile: ProductTile | None, *, of_down: bool
) -> dict[str, Any]:  # fmt: skip
    """Return the compile-time arguments of a product, all but the sizes of W; `tile` instead of the usual one."""
    meta = config(routing.block, x.element_size(), stack, of_down=of_down)
    return meta | (tile._asdict() if tile else {}) | dependent_launch(x.device)


def num_entries(routing: Routing) -> int:
    """Return the entries that the work list has memory for."""
    return 0 if routing.work is None else routing.work.expert.shape[0]


def sum_launch(z: torch.Tensor, routing: Routing, out: torch.Tensor, partial: torch.Tensor | None) -> None:
    """Fill out with the sum of each token, or with `partial` add them to it and fill that."""
    (num_tokens, top_k), hidden, block = routing.experts.shape, z.shape[1], 1024
    sum_kernel[(num_tokens, cdiv(hidden, block))](
        z, routing.experts, routing.weights, out, partial, HIDDEN=hidden, TOP_K=top_k, BLOCK=block, num_warps=8,
        **dependent_launch(z.device),
    )  # fmt: skip


def block_of(num_pairs: int, dtype: torch.dtype, stacks: Stacks | None) -> int:
    """Return the pairs of an entry of the work list for these products; 0: as many as `route.py` chooses."""
    if stacks is None or not all(segments.suits(num_pairs, dtype, stack) for stack in stacks):
        return 0
    return segments.BLOCK


def products_of(x: torch.Tensor, routing: Routing, stacks: Stacks) -> tuple[Product, Product]:
    """Return gate and up, and down, of these tokens: each takes rows, the routing and its stack."""
    if routing.block == block_of(routing.experts.numel(), x.dtype, stacks):
        return segments.gate_up, segments.down
    return gate_up_launch, down_launch


def launch(
    x: torch.Tensor, routing: Routing, stacks: Stacks, stream: ResidualStream | None = None,
    rows: QuantizedRows | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what `reference` returns, and change the stream as it does. rows: of `memory_for`, filled."""
    if routing.work is None or not launches(x):
        return reference(x, routing, stacks, stream)
    out, partial = (torch.empty_like(x), None) if stream is None else stream
    if x.shape[0]:
        gate_up, down = products_of(x, routing, stacks)
        if rows is not None:
            gate_up = functools.partial(gate_up_launch, rows=rows)
        y = gate_up(x, routing, stacks.gate_up)
        if stream is not None and down_alone.takes(*routing.experts.shape, stacks.down):
            form = config(routing.block, x.element_size(), stacks.down, of_down=True)
            down_alone.launch(rows_of(y, stacks.down), routing, stacks.down, stream, form)
        elif stream is not None and x.shape[0] <= FEW_TOKENS:
            # Where no token reaches an expert nothing is added, and what is known of the stream stays true.
            down_launch(y, routing, stacks.down, stream=stream)
        else:
            sum_launch(down(y, routing, stacks.down), routing, out, partial)
    return out
