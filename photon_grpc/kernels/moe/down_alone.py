"""Down of a single token: the products of its experts and their sum, added to the residual stream, in one kernel.

    h += round(Σ_j w_j · down_e(y_j))      j rising, in float32; e = e_j

A program has the same BN columns of all experts of the token, one above the other, so their rows of W are one tile, and
every product of it with every row of y is made: those of another expert's are left. What is kept is made as the kernels
for several tokens make it (`experts.py`), and so is the sum: the bits are theirs. No sum goes through memory.

Shapes: y [top_k, I], experts int32 and weights float32 [1, top_k], a Stack [E, H, I], h [1, H], partial [1, H / 16].
Bytes moved: the rows of W of the experts, all else is small.
"""

from __future__ import annotations

from typing import Any

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, next_power_of_2, tl
from photon_grpc.kernels.lang.squares import group_sums
from photon_grpc.kernels.linear.fused_linear import ResidualStream
from photon_grpc.kernels.moe.products import RowOperand, StackOperand, expert_product
from photon_grpc.kernels.moe.route import Routing
from photon_grpc.kernels.moe.stacks import Stack

#: Experts of a token whose rows of W are one tile.
MOST_PLACES = 8


@jit
def add_in_order(total, values, weights, PLACES: tl.constexpr):
    """Return total [N] + Σ_j values [N, j] · weights [j], j rising, each with one rounding."""
    if PLACES == 1:
        return tl.fma(tl.reshape(values, [values.shape[0]]), tl.sum(weights, 0), total)
    else:
        HALF: tl.constexpr = PLACES // 2
        first, second = tl.split(tl.permute(tl.reshape(values, [values.shape[0], 2, HALF]), [0, 2, 1]))
        of_first, of_second = tl.split(tl.permute(tl.reshape(weights, [2, HALF]), [1, 0]))
        return add_in_order(add_in_order(total, first, of_first, HALF), second, of_second, HALF)


@jit
def down_alone_kernel(
    y, weight, experts, weights, h, partial, SIZE: tl.constexpr, HIDDEN: tl.constexpr, TOP_K: tl.constexpr,
    PLACES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, EIGHT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the sum to BN columns of h per program, and leave its sums of squares.

    Experts and weights were complete before the kernel before began, and the stream is as the one before that left it.
    """
    number = tl.arange(0, PLACES * BN)
    place, row = number // BN, tl.program_id(0) * BN + number % BN
    expert = tl.load(experts + place, mask=place < TOP_K, other=-1, cache_modifier=".cg")
    in_w = ((expert >= 0) & (row < HIDDEN))[:, None]
    pair = tl.arange(0, BM)
    has = tl.load(experts + pair, mask=pair < TOP_K, other=-1, cache_modifier=".cg") >= 0
    order = tl.arange(0, PLACES)
    factors = tl.load(weights + order, mask=order < TOP_K, other=0.0, cache_modifier=".cg")
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = column < HIDDEN
    before = tl.load(h + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    of_w = tl.maximum(expert, 0).to(tl.int64)[:, None]
    acc = expert_product(y, pair, has, weight, of_w, row, in_w, HIDDEN, SIZE, BITS, GROUP, EIGHT, BK, PRECISION)
    # Zeros beside the one number of a row that is kept leave it as it is.
    kept = tl.sum(tl.where((pair[None, :] == place[:, None]) & in_w, acc, 0.0), 1)
    values = tl.permute(tl.reshape(kept, [PLACES, BN]), [1, 0])
    total = add_in_order(tl.zeros([BN], tl.float32), values, factors, PLACES)
    kind: tl.constexpr = h.dtype.element_ty
    rounded = (total.to(kind).to(tl.float32) + before).to(kind)
    tl.store(h + column, rounded, mask=inside)
    stored = tl.where(inside, rounded.to(tl.float32), 0.0)
    group = tl.program_id(0) * (BN // 16) + tl.arange(0, BN // 16)
    tl.store(partial + group, group_sums(stored * stored), mask=group < HIDDEN // 16)


#: Steps of 128 columns, so that the sums of 8 bits are those of other kernels: of activations of 16 and of 8 bits, and
#: of those of many columns.
TILE = {"BK": 128, "num_warps": 8, "num_stages": 4}
EIGHT_TILE = {"BK": 128, "num_warps": 8, "num_stages": 5}
LONG_TILE = {"BK": 128, "num_warps": 4, "num_stages": 6}
#: Of float32 activations that are not quantized.
WIDE_TILE = {"BK": 32, "num_warps": 4, "num_stages": 2}
#: Columns from which on there are many.
LONG = 4096


def takes(num_tokens: int, top_k: int, stack: Stack) -> bool:
    """Return whether the kernel multiplies by this stack, and is faster than those of several tokens."""
    if num_tokens > 1 or top_k > MOST_PLACES or stack.kind.BITS < 16:
        return False
    return stack.shape[2] < LONG or not stack.has_blocks


def config(top_k: int, itemsize: int, stack: Stack) -> dict[str, Any]:
    """Return the compile-time arguments of a tile for activations of `itemsize` bytes.

    It has at least 64 rows of W, which a matrix unit multiplies at once.
    """
    places = next_power_of_2(top_k)
    tile = LONG_TILE if stack.shape[2] >= LONG else EIGHT_TILE if stack.is_eight else TILE
    tile = WIDE_TILE if itemsize == 4 and not stack.is_eight else tile
    return {"TOP_K": top_k, "PLACES": places, "BN": max(16, 64 // places), "BM": 16} | tile


def launch(y: RowOperand, routing: Routing, stack: Stack, stream: ResidualStream, form: dict[str, Any]) -> None:
    """Add the sum of one token to the stream. form: of the weight, the constants of `expert_product`."""
    _, hidden, size = stack.shape
    tile = form | config(routing.experts.shape[1], stream.h.element_size(), stack)
    down_alone_kernel[(cdiv(hidden, tile["BN"]),)](
        y, StackOperand(stack.values, stack.scales, stack.zeros), routing.experts, routing.weights, *stream,
        SIZE=size, HIDDEN=hidden, **tile, **dependent_launch(stream.h.device),
    )  # fmt: skip
