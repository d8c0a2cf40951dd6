"""Products of 16-bit weights with 33 to 192 rows of x, whose steps are shared out evenly among programs (sm_90).

`fused_linear.py` has the formulas, `epilogue.py` the ends. The bits are those of `wgmma.py` and of the matrix library.

A program takes steps of tiles of 128 rows of W and all rows of x, as `wide.py` does: one warp fetches steps of 64
columns of both through the bulk copy engine into a ring, two groups of four warps multiply 64 rows of W each. Tiles do
not fill whole waves of programs; where the last wave would cost much, sums are handed on (`handed.py`).

Shapes: x [T, K] contiguous, W [N, K] with K in one slice, N a multiple of 128. bf16 and fp16; ends in bf16.
Operations: 2 · T · N · K. Bytes moved: N · K · itemsize, from the second-level cache x once for 128 rows of W.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import (
    constexpr_function,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon_jit,
    has_dependent_launch,
    has_wgmma,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from photon_grpc.kernels.lang.jit import cdiv, compiled_once, counters_of, num_multiprocessors
from photon_grpc.kernels.lang.ring import begin_ring
from photon_grpc.kernels.linear.boxes import box_layout, descriptor, rows_descriptor
from photon_grpc.kernels.linear.epilogue import exchanged
from photon_grpc.kernels.linear.handed import hand_on, job_of, num_jobs, take_over
from photon_grpc.kernels.linear.tiles import WIDE16, Problem, Tile, with_rows
from photon_grpc.kernels.linear.wide16_tiles import (
    BOX,
    GROUP_ROWS,
    ROWS,
    STEP,
    TABLE,
    WideTile16,
    has_second,
    tile_of,
)
from photon_grpc.kernels.linear.wide_sums import sums_layout

if TYPE_CHECKING:
    from photon_grpc.kernels.linear.fused_linear import Affine, Fusion

#: What the ends and the groups of warps of a tile are compiled for.
TILE = WIDE16
#: What was compiled in this process for every number of rows.
_COMPILED: set[Any] = set()


@constexpr_function
def rows_at_once(span: int, halves: int) -> int:
    """Return the rows of W that one copy has: those of a tile, if their pairs are neighbours."""
    rows = 128 * halves
    while span % (rows // 2):
        rows //= 2
    return rows


class Constants(NamedTuple):
    """Constants that a group of warps is compiled for, without those of its end."""

    P: Problem
    W: WideTile16
    TILE: Tile
    PDL: bool


@constexpr_function
def constants_of(problem: Problem, wide: WideTile16, tile: Tile, pdl: bool) -> Constants:
    """Return them together."""
    return Constants(problem, wide, tile, pdl)


@gluon_jit
def fetch_w(w, ring, number, at, P: gl.constexpr, W: gl.constexpr):
    """Begin the copies of a step's rows of the `number`-th tile of W, and say how many bytes the stage gets."""
    ws, _, ready, _ = ring
    step, stage, num_boxes = at
    bar = ready.index(stage)
    OF_TILE: gl.constexpr = 128 * W.HALVES
    ROWS: gl.constexpr = rows_at_once(P.SPAN, W.HALVES)
    MOST: gl.constexpr = (W.BM + W.MORE) // 32
    for boxes in gl.static_range(1, MOST + 1):
        mbarrier.expect(bar, 128 * (OF_TILE + 32 * boxes), pred=num_boxes == boxes)
    rows = ws._reinterpret(ws.dtype, [W.NS * OF_TILE // ROWS, ROWS, 64], box_layout(2, 16, 128))
    for part in gl.static_range(OF_TILE // ROWS):
        to = rows.index(stage * (OF_TILE // ROWS) + part)
        of_w = number * (OF_TILE // ROWS) + part
        if P.SPAN == 0:
            tma.async_copy_global_to_shared(w, [of_w * ROWS, step * 64], bar, to)
        else:
            pair = of_w * (ROWS // 2)
            pairs = to._reinterpret(to.dtype, [1, ROWS // 16, 2, 8, 64], box_layout(5, 16, 128))
            tma.async_copy_global_to_shared(w, [pair // P.SPAN, pair % P.SPAN // 8, 0, 0, step * 64], bar, pairs)


@gluon_jit
def fetch_x(x, ring, step, stage, num_boxes, W: gl.constexpr):
    """Begin the copies of a step's rows of x: of BM at once if they are there, else of 32; the rest stays as it is.

    A copy that reaches beyond the last row is slow.
    """
    boxed, whole = x
    _, x_rows, ready, _ = ring
    xs, more = x_rows
    at = ready.index(stage)
    OF_BM: gl.constexpr = W.BM // 32
    if num_boxes >= OF_BM:
        tma.async_copy_global_to_shared(whole, [0, step * 64], at, xs.index(stage))
    else:
        boxes = xs._reinterpret(xs.dtype, [W.NS * OF_BM, 32, 64], box_layout(2, 16, 128))
        for box in gl.static_range(OF_BM - 1):
            to = boxes.index(stage * OF_BM + box)
            tma.async_copy_global_to_shared(boxed, [box * 32, step * 64], at, to, pred=box < num_boxes)
    if W.MORE:
        OF_MORE: gl.constexpr = W.MORE // 32
        boxes = more._reinterpret(more.dtype, [W.NS * OF_MORE, 32, 64], box_layout(2, 16, 128))
        for box in gl.static_range(OF_MORE):
            to = boxes.index(stage * OF_MORE + box)
            there = OF_BM + box < num_boxes
            tma.async_copy_global_to_shared(boxed, [W.BM + box * 32, step * 64], at, to, pred=there)


@gluon_jit
def produce(sources, ring, num_rows, P: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr):
    """Fetch the tiles of this program, step by step: the program of the fetching warp.

    As much of W as there are stages is on its way before the kernel before has written x.
    """
    w, x = sources
    _, _, _, free = ring
    STEPS: gl.constexpr = (P.K + 63) // 64
    num_boxes = gl.minimum((num_rows + 31) // 32, (W.BM + W.MORE) // 32)
    num_tiles = P.N // (128 * W.HALVES)
    count = 0
    for job in range(num_jobs(num_tiles, STEPS, W.IS_HANDED)):
        number, first, last = job_of(job, num_tiles, STEPS, W.IS_HANDED)
        ahead = first
        if count == 0:
            ahead = gl.minimum(first + W.NS, last)
            for step in range(first, ahead):
                fetch_w(w, ring, number, (step, step - first, num_boxes), P, W)
            if PDL:
                gdc_wait()
                gdc_launch_dependents()
        for step in range(first, last):
            stage = count % W.NS
            if step >= ahead:
                mbarrier.wait(free.index(stage), (count // W.NS + 1) & 1)
                fetch_w(w, ring, number, (step, stage, num_boxes), P, W)
            fetch_x(x, ring, step, stage, num_boxes, W)
            count += 1


@gluon_jit
def multiply(sums, at, steps, W: gl.constexpr, GROUP: gl.constexpr):
    """Return sums with the products of the next steps, and the number of the step behind them.

    sums: [64, BM], and [64, MORE] or those of the second half; without either the second are not used. at: ring, number
    of the step.
    """
    ring, count = at
    ws, x_rows, ready, free = ring
    xs, more = x_rows
    NS: gl.constexpr = W.NS
    HAS_SECOND: gl.constexpr = has_second(W)
    first, second = sums
    for i in range(steps):
        stage = count % NS
        mbarrier.wait(ready.index(stage), count // NS & 1)
        at_w = (stage * 2 + GROUP) * W.HALVES
        x = xs.index(stage).permute([1, 0])
        first = warpgroup_mma(ws.index(at_w), x, first, is_async=True)
        if HAS_SECOND:
            if W.MORE:
                second = warpgroup_mma(ws.index(at_w), more.index(stage).permute([1, 0]), second, is_async=True)
            else:
                second = warpgroup_mma(ws.index(at_w + 1), x, second, is_async=True)
            first, second = warpgroup_mma_wait(2, deps=[first, second])
        else:
            first = warpgroup_mma_wait(1, deps=[first])
        # The step before is done; the one before them all was given back at its end.
        mbarrier.arrive(free.index((count + NS - 1) % NS), count=1, pred=i > 0)
        count += 1
    if HAS_SECOND:
        first, second = warpgroup_mma_wait(0, deps=[first, second])
    else:
        first = warpgroup_mma_wait(0, deps=[first])
    mbarrier.arrive(free.index((count + NS - 1) % NS), count=1)
    return first, second, count


@gluon_jit
def consume(tensors, LOAD: gl.constexpr, STORE: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    """Multiply and end 64 rows of W of every tile, or twice 64: the program of one group of four warps."""
    factors, result, ring, handed = tensors
    y, operands, num_rows = result
    P: gl.constexpr = C.P
    W: gl.constexpr = C.W
    TILE: gl.constexpr = C.TILE
    STEPS: gl.constexpr = (P.K + 63) // 64
    BM: gl.constexpr = W.BM
    MORE: gl.constexpr = W.MORE
    OF_SECOND: gl.constexpr = MORE if MORE else BM
    #: The first row of x of the second sums.
    MORE_FROM: gl.constexpr = BM if MORE else 0
    HAS_SECOND: gl.constexpr = has_second(W)
    if C.PDL:
        gdc_wait()
    num_tiles = P.N // (128 * W.HALVES)
    count = 0
    for job in range(num_jobs(num_tiles, STEPS, W.IS_HANDED)):
        number, begin, end = job_of(job, num_tiles, STEPS, W.IS_HANDED)
        first = gl.zeros([64, BM], gl.float32, sums_layout(BM))
        second = gl.zeros([64, OF_SECOND], gl.float32, sums_layout(OF_SECOND))
        is_whole = True
        if W.IS_HANDED:
            first, second = take_over(handed, GROUP, begin > 0, first, second, HAS_SECOND)
            first, second, count = multiply((first, second), (ring, count), end - begin, W, GROUP)
            is_whole = end == STEPS
            if not is_whole:
                hand_on(handed, GROUP, first, second, HAS_SECOND)
        else:
            first, second, count = multiply((first, second), (ring, count), STEPS, W, GROUP)
        if is_whole:
            program = (number * 2 + GROUP) * W.HALVES
            to = (y, operands, num_rows, (program, 0))
            STORE(exchanged(first, factors, to, P, TILE), LOAD(to, P, TILE), to, P, TILE)
            if HAS_SECOND:
                of_second: gl.constexpr = with_rows(P, OF_SECOND)
                to = (y, operands, num_rows, (program + W.HALVES - 1, MORE_FROM))
                STORE(exchanged(second, factors, to, of_second, TILE), LOAD(to, of_second, TILE), to, of_second, TILE)


@gluon_jit
def wide16_kernel(
    w, bias, x, whole_x, y, num_rows, norms, operands, handed,
    LOAD: gl.constexpr, STORE: gl.constexpr, P: gl.constexpr, TILE: gl.constexpr, W: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply W by x; persistent programs of four warps, and five more.

    w, x, whole_x: descriptors; x of BOX rows, whole_x of BM. norms: float32 [num_rows], what the product is multiplied
    by after it is rounded, or None. LOAD and STORE are a pair of `epilogue.py`, `operands` what they take; P is a
    Problem with BM of W, a WideTile16. handed: memory and counters of `handed.py`, or None.
    """
    NS: gl.constexpr = W.NS
    BM: gl.constexpr = W.BM
    MORE: gl.constexpr = W.MORE
    kind: gl.constexpr = x.dtype
    ws = gl.allocate_shared_memory(kind, [NS * 2 * W.HALVES, 64, 64], box_layout(2, 16, 128))
    xs = gl.allocate_shared_memory(kind, [NS, BM, 64], box_layout(2, 16, 128))
    more = xs
    if MORE:
        more = gl.allocate_shared_memory(kind, [NS, MORE, 64], box_layout(2, 16, 128))
    ready, free = begin_ring(NS, 2)
    ring = (ws, (xs, more), ready, free)
    tensors = ((norms, bias), (y, operands, num_rows), ring, handed)
    constants: gl.constexpr = constants_of(P, W, TILE, PDL)
    gl.warp_specialize(
        [
            (consume, (tensors, LOAD, STORE, constants, 0)),
            (consume, (tensors, LOAD, STORE, constants, 1)),
            (produce, ((w, (x, whole_x)), ring, num_rows, P, W, PDL)),
        ],
        [4, 1],
        [232, 40],
    )


def knows(x: torch.Tensor, linear: Affine) -> bool:
    """Return whether the kernel multiplies this weight of gate and up at some number of rows of x."""
    w = linear.w
    fits = isinstance(w, torch.Tensor) and linear.slices == 1 and tuple(w.shape) in TABLE and x.is_contiguous()
    return fits and x.dtype == torch.bfloat16 and has_wgmma(x.device)


def launch(
    fusion: Fusion, x: torch.Tensor, linear: Affine, y: torch.Tensor,
    norms: torch.Tensor | None = None, tile: WideTile16 | None = None,
) -> None:  # fmt: skip
    """Fill y. `norms` are needed with a norm (squares.norms). tile: None for that of the table, which has one."""
    preload(fusion, x, linear, y, norms)
    tile = tile or tile_of(x.shape[0], *linear.w.shape)
    assert tile is not None
    grid = (min(num_multiprocessors(x.device), linear.w.shape[0] // (ROWS * tile.HALVES)),)
    wide16_kernel[grid](*_arguments(fusion, x, linear, y, norms, tile), **_options(x))


def preload(fusion: Fusion, x: torch.Tensor, linear: Affine, y: torch.Tensor, norms: torch.Tensor | None) -> None:
    """Compile every tile that the table has for the weight, once: steps of other sizes take others."""
    known = TABLE.get(tuple(linear.w.shape), {}).values()
    key = linear.w.shape, fusion.store, fusion.span, x.dtype, y.dtype, linear.b is None
    calls = (_arguments(fusion, x, linear, y, norms, tile) for tile in known)
    compiled_once(wide16_kernel, _COMPILED, key, calls, **_options(x))


def _options(x: torch.Tensor) -> dict[str, Any]:
    pdl = has_dependent_launch(x.device)
    return {"num_warps": TILE.KW, "launch_pdl": True} if pdl else {"num_warps": TILE.KW}


def _arguments(
    fusion: Fusion, x: torch.Tensor, linear: Affine, y: torch.Tensor, norms: torch.Tensor | None, tile: WideTile16
) -> tuple[Any, ...]:
    w, (num_rows, k), device = linear.w, x.shape, x.device
    assert isinstance(w, torch.Tensor)
    n, programs, span = w.shape[0], num_multiprocessors(device), fusion.span
    handed = None
    if tile.IS_HANDED:
        size = 2 * programs * GROUP_ROWS * tile.rows * tile.HALVES
        handed = torch.empty(size, dtype=torch.float32, device=device), counters_of(w, 2 * programs)
    bias = linear.b if norms is not None else None
    of_w = rows_descriptor(w, (rows_at_once(span, tile.HALVES), STEP), span, 128)
    of_x = [descriptor(with_memory(x), [rows, STEP], 128) for rows in (BOX, tile.BM)]
    problem = Problem(n, k, tile.BM, span, HEADS=fusion.heads)
    tensors = of_w, bias, *of_x, y, num_rows, norms, fusion.operands, handed
    return (*tensors, fusion.load, fusion.store, problem, TILE, tile, has_dependent_launch(device))


def with_memory(x: torch.Tensor) -> torch.Tensor:
    """Return x with rows of memory behind it, if there are, so that no copy reaches beyond the last row."""
    num_rows, k = x.shape
    there = (x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()) // k
    return x.as_strided((min(cdiv(num_rows, BOX) * BOX, there), k), x.stride())
