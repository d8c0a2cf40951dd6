"""One id for each row of logits, without filters: the argmax, or a sample of the softmax by the Gumbel-max trick.

    id = argmax(logits / temperature + gumbel(seed, position, output index, token)),   argmax(logits) at temperature 0

position = context_len - num_prompt. With a LogitsProcessing, the logits are first processed as in `process_logits.py`,
and may be changed.
The id is INVALID (-1) where a row holds NaN or +infinity, or nothing above -infinity; NOTHING (-2) where nothing is
above it in a row for which a ban, a limit or a mask holds. Of equal values the lowest id wins. Noise is as in
`noise.py`.

Shapes: logits [R, V] float32 or bf16 (float32 to be processed), SamplingMetadata of the R rows, LogitsProcessing of S
slots or None -> int64 [R]. Bytes moved: the logits, once, and what `process_logits.py` reads.

Two kernels: `sample_kernel` for a tile of one row's columns, `sample_merge_kernel` for the tiles of a row. The epilogue
`store_best` of `linear/epilogue.py` does what the first does with logits that are not written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from photon_grpc.kernels.lang.gluon import dependent_launch, gdc_launch_dependents, gdc_wait
from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.sampling import noise, process_logits
from photon_grpc.kernels.sampling.noise import gumbel
from photon_grpc.kernels.sampling.process_logits import LogitsProcessing, load_processed

#: Ids for a row whose logits are not finite, and for one that may sample nothing.
INVALID, NOTHING = -1, -2


class SamplingMetadata(NamedTuple):
    """The inputs of all sampling: each row's slot, and the parameters of every slot.

    slots: int64 [R]. context_len: int32 or int64 [R], tokens before the one to sample. temperature: float32 [S].
    seed (bit pattern of a uint64), output_index, num_prompt: int64 [S].
    """

    slots: torch.Tensor
    context_len: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    output_index: torch.Tensor
    num_prompt: torch.Tensor


class TileBest(NamedTuple):
    """The best of every tile of every row [R, tiles].

    The best value float32, the highest logit float32 (infinite if one is NaN), the id of the best value int32.
    is_constrained: bool [R], whether a ban, a limit or a mask holds; None if for no row.
    """

    value: torch.Tensor
    top: torch.Tensor
    number: torch.Tensor
    is_constrained: torch.Tensor | None = None


def reference(
    logits: torch.Tensor, metadata: SamplingMetadata, processing: LogitsProcessing | None = None
) -> torch.Tensor:
    """Sample in torch."""
    is_constrained = None
    if processing is not None:
        is_constrained = process_logits.reference(logits, metadata.slots, metadata.context_len, processing)
    logits, slots = logits.float(), metadata.slots
    best, greedy = logits.max(-1)
    temperature, position = metadata.temperature[slots], metadata.context_len - metadata.num_prompt[slots]
    is_greedy = temperature <= 0.0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    sampled = scaled + noise.reference(metadata.seed[slots], position, metadata.output_index[slots], logits.shape[1])
    return checked(torch.where(is_greedy, greedy, sampled.argmax(-1)), best, is_constrained)


def checked(ids: torch.Tensor, best: torch.Tensor, is_constrained: torch.Tensor | None) -> torch.Tensor:
    """Return, in torch, the ids [R] of rows whose highest logit is finite; INVALID or NOTHING for others."""
    ids = torch.where(best.isfinite(), ids, INVALID)
    return ids if is_constrained is None else torch.where(is_constrained & (best == -torch.inf), NOTHING, ids)


@jit
def sample_kernel(
    logits, metadata, processing, best_of, num_columns, stride, num_tiles, first, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Store the fields of TileBest for one tile of one row; column 0 is id `first`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK + tl.arange(0, BLOCK)
    slot, length = tl.load(metadata.slots + row), tl.load(metadata.context_len + row)
    if best_of.is_constrained is None:
        inside = column < num_columns
        logit = tl.load(logits + row * stride + column, mask=inside, other=-float("inf")).to(tl.float32)
    else:
        logit, constrained = load_processed(logits + row * stride, column, slot, length, processing, num_columns)
        if tile == 0:
            tl.store(best_of.is_constrained + row, constrained)
    temperature = tl.load(metadata.temperature + slot)
    # The id has no meaning where the highest is infinite, so NaN needs no distinction.
    top, number = tl.max(tl.where(logit != logit, float("inf"), logit), axis=0, return_indices=True)
    best = top
    if temperature > 0.0:
        position = length - tl.load(metadata.num_prompt + slot)
        seed, index = tl.load(metadata.seed + slot), tl.load(metadata.output_index + slot)
        value = tl.div_rn(logit, temperature) + gumbel(seed, position, index, first + column)
        best, number = tl.max(tl.where(value == value, value, -float("inf")), axis=0, return_indices=True)
    place = row * num_tiles + tile
    tl.store(best_of.value + place, best)
    tl.store(best_of.top + place, top)
    tl.store(best_of.number + place, first + tile * BLOCK + number)


@jit
def sample_merge_kernel(best_of, out, num_tiles, TILES_PAD: tl.constexpr, PDL: tl.constexpr):
    """Choose the best tile of one row per program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_PAD)
    inside = tile < num_tiles
    place = row * num_tiles + tile
    value = tl.load(best_of.value + place, mask=inside, other=-float("inf"))
    top = tl.max(tl.load(best_of.top + place, mask=inside, other=-float("inf")), axis=0)
    number = tl.load(best_of.number + place, mask=inside, other=2147483647)
    best = tl.max(value, axis=0)
    sampled = tl.min(tl.where(value == best, number, 2147483647), axis=0).to(tl.int64)
    failed = tl.full([], -1, tl.int64)
    if best_of.is_constrained is not None:
        failed = tl.where(tl.load(best_of.is_constrained + row) & (top == -float("inf")), failed - 1, failed)
    finite = (top < float("inf")) & (top > -float("inf"))
    tl.store(out + row, tl.where(finite, sampled, failed))


def config() -> dict[str, Any]:
    """Return the compile-time arguments of `sample_kernel`."""
    return {"BLOCK": 2048, "num_warps": 4}


def launch(
    logits: torch.Tensor, metadata: SamplingMetadata, processing: LogitsProcessing | None = None
) -> torch.Tensor:
    """Return int64 [R]; see `reference`. Rows of `logits` may be strided, columns not."""
    if not launches(logits):
        return reference(logits, metadata, processing)
    return merge(_best(logits, metadata, processing, 0))


def best_launch(logits: torch.Tensor, metadata: SamplingMetadata, first: int) -> TileBest:
    """Return the best of logits of some of the ids, which begin with `first`: those of several parts are merged."""
    return _best(logits, metadata, None, first) if launches(logits) else best_reference(logits, metadata, first)


def best_reference(logits: torch.Tensor, metadata: SamplingMetadata, first: int) -> TileBest:
    """Return the best in torch, of one tile."""
    slots, ids = metadata.slots, torch.arange(first, first + logits.shape[1], device=logits.device)
    temperature, position = metadata.temperature[slots, None], metadata.context_len - metadata.num_prompt[slots]
    tokens = ids.expand(logits.shape)
    scaled = logits / torch.where(temperature > 0.0, temperature, 1.0)
    sampled = scaled + noise.reference(metadata.seed[slots], position, metadata.output_index[slots], tokens)
    value = torch.where(temperature > 0.0, sampled, logits).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    best, at = value.max(-1, keepdim=True)
    top = logits.nan_to_num(torch.inf, torch.inf, -torch.inf).amax(-1, keepdim=True)
    return TileBest(best, top, ids[at].int())


def _best(
    logits: torch.Tensor, metadata: SamplingMetadata, processing: LogitsProcessing | None, first: int
) -> TileBest:
    num_rows, num_columns = logits.shape
    meta: dict[str, Any] = config() | dependent_launch(logits.device)
    tiles = cdiv(num_columns, meta["BLOCK"])
    best = best_of_tiles(num_rows, tiles, logits.device, is_processed=processing is not None)
    if num_rows:
        numbers = num_columns, logits.stride(0), tiles, first
        sample_kernel[(num_rows, tiles)](logits, metadata, processing, best, *numbers, **meta)
    return best


def best_of_tiles(num_rows: int, num_tiles: int, device: torch.device, *, is_processed: bool = False) -> TileBest:
    """Return memory for a TileBest."""
    # Memory of its own each: a part of one tensor may begin anywhere, and a kernel is compiled anew for that.
    values, tops = (torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device) for _ in range(2))
    ids = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    return TileBest(values, tops, ids, torch.empty(num_rows, dtype=torch.bool, device=device) if is_processed else None)


def merge_reference(best: TileBest) -> torch.Tensor:
    """Return the ids in torch, int64 [R]."""
    value = best.value.amax(-1, keepdim=True)
    ids = torch.where(best.value == value, best.number, 2**31 - 1).amin(-1).long()
    return checked(ids, best.top.amax(-1), best.is_constrained)


def merge(best: TileBest) -> torch.Tensor:
    """Return the ids, int64 [R]."""
    num_rows, tiles = best.value.shape
    if not launches(best.value):
        return merge_reference(best)
    out = torch.empty(num_rows, dtype=torch.int64, device=best.value.device)
    if num_rows:
        pad = next_power_of_2(tiles)
        meta = {"TILES_PAD": pad, "num_warps": max(1, min(8, pad // 256))}
        sample_merge_kernel[(num_rows,)](best, out, tiles, **meta, **dependent_launch(out.device))
    return out
