"""The sum of all ranks' parts, added to the residual stream, by memory that GPUs write to each other.

    h = round(round(part[0] + … + part[size - 1]) + round(h + b))     parts in float32, added in the order of ranks

Every rank has an *inbox*: planes of parts, one for each other rank, in which every word is EMPTY until it has come. A
program pushes its columns of a row into the inboxes of all others, waits in its own until no word is EMPTY, adds, and
leaves EMPTY behind. No flag is needed: a word is its own arrival. A part's word that equals EMPTY, a NaN that no GPU
makes, becomes another NaN. Parts may also be pushed as copies, which take no multiprocessor.

Two exchanges that follow each other use different planes. A rank writes plane 0 again once it has taken all of plane 1,
which the others pushed after they had emptied plane 0; so two planes, in turns, suffice.

Shapes: h [T, H] contiguous, part float32 [T, H], b [H] or None, partial sums of squares as in `lang/squares.py`; an
plane is int32 [size - 1, rows, H] in every rank's memory, without its own part. bf16, fp16, fp32; H a multiple of 16.
Bytes moved: (4 · size + 2 · itemsize) · T · H, of them 4 · (size - 1) · T · H from each GPU to others.
"""

from __future__ import annotations

from typing import Any

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, tl
from photon_grpc.kernels.lang.squares import group_sums
from photon_grpc.kernels.linear import slices

#: All bits set.
EMPTY = -1
#: A program looks so often for the words of another rank: for about 10 s. A rank that meets a kernel to be compiled is
#: late by seconds; one that has ended, or is stopped, is noticed sooner, by the host.
LOOKS = 16_000_000
#: The planes that exchanges of few rows use in turns, and the rows that they have: more than a decode step.
NUM_PLANES, NUM_PUSHED = 2, 512
#: Bytes of a plane for a piece of more rows. The host launches what each needs, so that there must not be many.
PIECE_BYTES = 32 << 20


def sends_pieces(size: int) -> bool:
    """Return whether parts of more rows go in pieces through planes.

    Every rank sends each part to all others, which between more than two takes longer than if ranks share out the rows:
    477 against 219 µs for 2,048 rows of 4,096 numbers on four H200s.
    """
    return size == 2


def piece_rows(hidden: int) -> int:
    """Return the rows of a plane for a piece."""
    return PIECE_BYTES // (4 * hidden)


def reference(h: torch.Tensor, parts: torch.Tensor, b: torch.Tensor | None) -> None:
    """Change h by float32 parts [size, T, H], in torch."""
    slices.add_reference(h, parts, b)


@jit
def words(part):
    """Return the words of a part, none of them EMPTY."""
    bits = part.to(tl.int32, bitcast=True)
    return tl.where(bits == -1, 2147483647, bits)


@jit
def push(part, inboxes, place, inside, distance, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Store words of this rank at `place` of its part of every other inbox; `distance` is between ranks' parts."""
    bits = words(part)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            tl.store(inboxes[rank] + (RANK - (rank < RANK)) * distance + place, bits, mask=inside)


@jit
def take(part, inboxes, place, inside, distance, RANK: tl.constexpr, SIZE: tl.constexpr, LOOKS: tl.constexpr):
    """Return the sum of all ranks' parts, this rank's own being `part`, once they have come; leave EMPTY behind."""
    total = tl.zeros_like(part)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            came = words(part)
        else:
            at = inboxes[RANK] + (rank - (rank > RANK)) * distance + place
            came = tl.load(at, mask=inside, other=0, volatile=True)
            looks = 0
            while (tl.max((came == -1).to(tl.int32), axis=0) > 0) & (looks < LOOKS):
                came = tl.load(at, mask=inside, other=0, volatile=True)
                looks += 1
            if looks == LOOKS:
                # The other rank is gone: this one's device is lost, which ends its process.
                tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
            tl.store(at, tl.full(came.shape, -1, tl.int32), mask=inside)
        number = came.to(tl.float32, bitcast=True)
        total = number if rank == 0 else total + number
    return total


@jit
def add(h, bias, squares, total, row, column, inside, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Change BLOCK columns of a row of h by the sum, and store the sums of its squares."""
    residual = tl.load(h + row * HIDDEN + column, mask=inside, other=0.0)
    if bias is not None:
        added = residual.to(tl.float32) + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        residual = added.to(residual.dtype)
    rounded = total.to(residual.dtype).to(tl.float32)
    changed = tl.where(inside, (rounded + residual.to(tl.float32)).to(residual.dtype), 0.0)
    tl.store(h + row * HIDDEN + column, changed, mask=inside)
    number = changed.to(tl.float32)
    group = tl.program_id(1) * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
    tl.store(squares + row * (HIDDEN // 16) + group, group_sums(number * number), mask=group < HIDDEN // 16)


@jit
def push_kernel(part, inboxes, HIDDEN: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Push BLOCK columns of one row per program; for tests, which run ranks one after the other."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    own = tl.load(part + row * HIDDEN + column, mask=inside, other=0.0)
    place = row * HIDDEN + column
    push(own, inboxes, place, inside, ROWS * HIDDEN, RANK, SIZE)


@jit
def exchange_kernel(h, part, bias, squares, inboxes, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
                    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PUSHES: tl.constexpr,
                    LOOKS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Exchange BLOCK columns of one row per program, all of which run at a time or begin in their order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    own = tl.load(part + row * HIDDEN + column, mask=inside, other=0.0)
    place = row * HIDDEN + column
    if PUSHES:
        push(own, inboxes, place, inside, ROWS * HIDDEN, RANK, SIZE)
    total = take(own, inboxes, place, inside, ROWS * HIDDEN, RANK, SIZE, LOOKS)
    add(h, bias, squares, total, row, column, inside, HIDDEN, BLOCK)


def config() -> dict[str, Any]:
    """Return the compile-time arguments that depend on nothing."""
    return {"BLOCK": 512, "num_warps": 4}


def launch(
    h: torch.Tensor, part: torch.Tensor, b: torch.Tensor | None, squares: torch.Tensor,
    plane: tuple[torch.Tensor, ...], rank: int, *, pushes: bool = True,
) -> None:  # fmt: skip
    """Change h, and store the sums of its squares, with all ranks; `plane` is its memory of all, in their order.

    h has at most as many rows as a plane. Without `pushes` the part is on its way to the others already, and was made
    by another than the kernel before.
    """
    num_rows, hidden = h.shape
    meta = config() | {"HIDDEN": hidden, "ROWS": plane[rank].shape[1], "RANK": rank, "SIZE": len(plane)}
    if num_rows:
        grid = num_rows, cdiv(hidden, meta["BLOCK"])
        more = {"PUSHES": pushes, "LOOKS": LOOKS, **(dependent_launch(h.device) if pushes else {"PDL": False})}
        exchange_kernel[grid](h, part, b, squares, plane, **meta, **more)


def request(h: torch.Tensor, b: torch.Tensor | None, squares: torch.Tensor, rank: int, size: int) -> None:
    """Launch what exchanges between so many ranks launch, in a dry run, which only compiles it."""
    part, word = torch.empty_like(h, dtype=torch.float32), torch.empty((), dtype=torch.int32, device=h.device)
    pieces = [(piece_rows(h.shape[1]), False)] if sends_pieces(size) else []
    for num_rows, pushes in [(NUM_PUSHED, True), *pieces]:
        plane = (word.expand(size - 1, num_rows, h.shape[1]),) * size
        launch(h, part, b, squares, plane, rank, pushes=pushes)
