"""Log-probabilities and ranks of the sampled id, of the N best and of given ids, as packed records.

    logprob(id) = logits[id] - log Σ exp(logits),   rank(id) = 1 + the ids with a greater logit

A record is three words of 32 bits: id int32, logprob float32, rank int32. A row has 1 + N + G of them: the sampled id;
the N best, best first, of equal ones the lowest id first; the G given ids in their order.

The N best are among the elements that are not below the N-th largest maximum of a tile: there are few of them, so that
a tile gives its own best by taking its maximum out, seldom more than once. Where all are equal a tile gives N. Every
sum is taken in an order that depends on nothing but the number of columns.

Shapes: logits float32 [R, V], V at least N; ids int64 [R]; LogprobMetadata -> int32 [R, MAX_RECORDS, 3], of which only
the first 1 + N + G records of rows that ask for them are written. Bytes moved: 8 · R · V, and 4 · G · R · V out of the
cache; nothing for other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from photon_grpc.kernels.lang.jit import cdiv, jit, launches, next_power_of_2, tl
from photon_grpc.kernels.sampling.topk_topp import ordinal, value_of

MAX_BEST, MAX_GIVEN = 20, 20
MAX_RECORDS = 1 + MAX_BEST + MAX_GIVEN


class LogprobMetadata(NamedTuple):
    """Each row's slot, and the log-probabilities that every slot asks for.

    slots: int64 [R]. num_best: int64 [S], N; -1 if nothing is asked for. num_given: int64 [S], G. given: int32
    [S, MAX_GIVEN].
    """

    slots: torch.Tensor
    num_best: torch.Tensor
    num_given: torch.Tensor
    given: torch.Tensor


class TileLogprobs(NamedTuple):
    """Results of T tiles of each row, and of all of them together.

    peaks, sums: float32 [R, T], the maximum, and Σ exp(logit - maximum). log_sums: float32 [R]. least: int32 [R], the
    `ordinal` below which no element is among the best. above: int32 [R, 1 + MAX_GIVEN, T], elements greater than that
    of the chosen and of each given id. best, best_ids: int32 [R, T, MAX_BEST], ordinals; num_found: int32 [R, T].
    """

    peaks: torch.Tensor
    sums: torch.Tensor
    log_sums: torch.Tensor
    least: torch.Tensor
    above: torch.Tensor
    best: torch.Tensor
    best_ids: torch.Tensor
    num_found: torch.Tensor


def reference(logits: torch.Tensor, ids: torch.Tensor, metadata: LogprobMetadata) -> torch.Tensor:
    """Return log-probabilities in NumPy, on the host."""
    rows, chosen, slots, num_best, num_given, given = (each.cpu().numpy() for each in (logits, ids, *metadata))
    records = np.zeros((len(rows), MAX_RECORDS, 3), dtype=np.int32)
    for row in (num_best[slots] >= 0).nonzero()[0]:
        slot = slots[row]
        requested = np.concatenate([chosen[row : row + 1].clip(min=0), given[slot, : num_given[slot]]])
        found = _row_records(rows[row], requested, num_best[slot])
        records[row, : len(found)] = found
    return torch.from_numpy(records).to(logits.device)


def _row_records(logits: npt.NDArray[np.float32], requested: npt.NDArray[Any], num_best: int) -> npt.NDArray[np.int32]:
    """Return int32 [1 + N + G, 3]; `requested` has the sampled and the given ids."""
    best = _best(logits, num_best)
    ids = np.concatenate([requested[:1], best, requested[1:]])
    ranks = [1 + np.count_nonzero(logits > own) for own in logits[requested]]
    best_ranks = 1 + np.searchsorted(-logits[best], -logits[best])
    # A row that has failed may hold no number.
    with np.errstate(invalid="ignore"):
        top = logits.max()
        logprobs = logits[ids] - (top + np.log(np.exp(logits - top).sum()))
    columns = ids, logprobs.astype(np.float32).view(np.int32), np.concatenate([ranks[:1], best_ranks, ranks[1:]])
    return np.stack(columns, axis=1).astype(np.int32)


def _best(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[Any]:
    """Return the largest ids, lowest first if equal, among those not below the count-th largest tile maximum."""
    count = min(count, len(logits))
    width = min(256, len(logits) // max(1, count))
    peaks = logits[: len(logits) // width * width].reshape(-1, width).max(axis=1)
    candidates = np.flatnonzero(logits >= np.sort(peaks)[-count]) if count else np.arange(0)
    return candidates[np.argsort(-logits[candidates], kind="stable")[:count]]


@jit
def take_best(numbers, ids):
    """Return the largest of the ordinals, its lowest id, and the ordinals without it."""
    best = tl.max(numbers, axis=0)
    best_id = tl.min(tl.where(numbers == best, ids, 2147483647), axis=0)
    # 0 is not the ordinal of any float.
    return best, best_id, tl.where(ids == best_id, 0, numbers)


@jit
def requested_id(ids, metadata, row, slot, number, MAX_GIVEN: tl.constexpr):
    """Return the id of this number: 0 is the sampled id, below 0 if the row has failed; the given ones follow."""
    chosen = tl.load(ids + row, mask=number == 0, other=0)
    given = tl.load(metadata.given + slot * MAX_GIVEN + number - 1, mask=number > 0, other=0)
    return tl.maximum(chosen, 0) + given


@jit
def logprob_peak_kernel(logits, metadata, tiles, num_columns, stride, BLOCK: tl.constexpr):
    """Store maximum and sum of a tile, in a grid (R, T)."""
    row, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if tl.load(metadata.num_best + tl.load(metadata.slots + row)) >= 0:
        column = tile * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < num_columns, other=-float("inf"))
        peak = tl.max(value, axis=0)
        total = tl.sum(tl.exp(value - peak), axis=0)
        tl.store(tiles.peaks + row * num_tiles + tile, peak)
        tl.store(tiles.sums + row * num_tiles + tile, tl.where(peak > -float("inf"), total, 0.0))


@jit
def logprob_merge_kernel(metadata, tiles, num_tiles, TILES_PAD: tl.constexpr):
    """Store log_sums and least of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    num_best = tl.load(metadata.num_best + tl.load(metadata.slots + row))
    if num_best >= 0:
        tile = tl.arange(0, TILES_PAD)
        inside = tile < num_tiles
        peaks = tl.load(tiles.peaks + row * num_tiles + tile, mask=inside, other=-float("inf"))
        sums = tl.load(tiles.sums + row * num_tiles + tile, mask=inside, other=0.0)
        peak = tl.max(peaks, axis=0)
        tl.store(tiles.log_sums + row, peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), axis=0)))
        numbers = tl.where(inside, ordinal(peaks), 0)
        least = tl.full([], 0, tl.uint32)
        for _ in range(num_best):
            least, _tile, numbers = take_best(numbers, tile)
        # Above the ordinal for no element, if there are fewer tiles than that.
        tl.store(tiles.least + row, tl.maximum(least, 1).to(tl.int32, bitcast=True))


@jit
def logprob_best_kernel(
    logits, ids, metadata, tiles, num_columns, stride, num_tiles,
    BLOCK: tl.constexpr, MAX_BEST: tl.constexpr, MAX_GIVEN: tl.constexpr,
):  # fmt: skip
    """Store above, best, best_ids and num_found, in a grid (R, T)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(metadata.slots + row)
    num_best = tl.load(metadata.num_best + slot)
    if num_best >= 0:
        column = tile * BLOCK + tl.arange(0, BLOCK)
        inside = column < num_columns
        value = tl.load(logits + row * stride + column, mask=inside, other=-float("inf"))
        above = tiles.above + row * (1 + MAX_GIVEN) * num_tiles + tile
        for number in range(1 + tl.load(metadata.num_given + slot)):
            own = tl.load(logits + row * stride + requested_id(ids, metadata, row, slot, number, MAX_GIVEN))
            tl.store(above + number * num_tiles, tl.sum((value > own).to(tl.int32), axis=0))
        numbers = tl.where(inside, ordinal(value), 0)
        least = tl.load(tiles.least + row).to(tl.uint32, bitcast=True)
        place = (row * num_tiles + tile) * MAX_BEST
        num_found = 0
        while (num_found < num_best) & (tl.max(numbers, axis=0) >= least):
            best, best_id, numbers = take_best(numbers, column)
            tl.store(tiles.best + place + num_found, best.to(tl.int32, bitcast=True))
            tl.store(tiles.best_ids + place + num_found, best_id)
            num_found += 1
        tl.store(tiles.num_found + row * num_tiles + tile, num_found)


@jit
def store_record(record, token, logprob, rank):
    tl.store(record, token.to(tl.int32))
    tl.store(record + 1, logprob.to(tl.int32, bitcast=True))
    tl.store(record + 2, rank)


@jit
def logprob_record_kernel(
    logits, ids, metadata, tiles, records, stride, num_tiles,
    TILES_PAD: tl.constexpr, BEST_PAD: tl.constexpr, MAX_BEST: tl.constexpr, MAX_GIVEN: tl.constexpr,
):  # fmt: skip
    """Write the records of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(metadata.slots + row)
    num_best = tl.load(metadata.num_best + slot).to(tl.int32)
    if num_best >= 0:
        log_sum = tl.load(tiles.log_sums + row)
        out = records + row * (1 + MAX_BEST + MAX_GIVEN) * 3
        tile = tl.arange(0, TILES_PAD)
        for number in range(1 + tl.load(metadata.num_given + slot).to(tl.int32)):
            requested = requested_id(ids, metadata, row, slot, number, MAX_GIVEN)
            above = tiles.above + (row * (1 + MAX_GIVEN) + number) * num_tiles + tile
            rank = 1 + tl.sum(tl.load(above, mask=tile < num_tiles, other=0), axis=0)
            place = tl.where(number == 0, 0, num_best + number)
            store_record(out + place * 3, requested, tl.load(logits + row * stride + requested) - log_sum, rank)
        entry = tl.arange(0, TILES_PAD * BEST_PAD)
        tile, number = entry // BEST_PAD, entry % BEST_PAD
        num_found = tl.load(tiles.num_found + row * num_tiles + tile, mask=tile < num_tiles, other=0)
        place = (row * num_tiles + tile) * MAX_BEST + number
        numbers = tl.load(tiles.best + place, mask=number < num_found, other=0).to(tl.uint32, bitcast=True)
        # Different where there is none, so that none of those is taken for the best.
        best_ids = tl.load(tiles.best_ids + place, mask=number < num_found, other=2147483647)
        rank, before = 1, tl.full([], 0, tl.uint32)
        for number in range(num_best):
            best, best_id, numbers = take_best(numbers, best_ids)
            rank = tl.where(best == before, rank, number + 1)
            store_record(out + (1 + number) * 3, best_id, value_of(best) - log_sum, rank)
            before = best


def config() -> dict[str, Any]:
    """Return the compile-time arguments of the kernels that take a tile."""
    return {"BLOCK": 2048, "num_warps": 4}


def merge_config(num_columns: int) -> dict[str, Any]:
    """Return the compile-time arguments of `logprob_merge_kernel`."""
    return {"TILES_PAD": next_power_of_2(cdiv(num_columns, config()["BLOCK"])), "num_warps": 1}


def record_config(num_columns: int) -> dict[str, Any]:
    """Return the compile-time arguments of `logprob_record_kernel`."""
    return merge_config(num_columns) | {"BEST_PAD": next_power_of_2(MAX_BEST), "num_warps": 8} | LIMITS


LIMITS = {"MAX_BEST": MAX_BEST, "MAX_GIVEN": MAX_GIVEN}


def launch(logits: torch.Tensor, ids: torch.Tensor, metadata: LogprobMetadata) -> torch.Tensor:
    """Return int32 [R, MAX_RECORDS, 3]; see `reference`. Rows of `logits` may be strided, columns not."""
    if not launches(logits):
        return reference(logits, ids, metadata)
    num_rows, num_columns = logits.shape
    num_tiles, stride = cdiv(num_columns, config()["BLOCK"]), logits.stride(0)
    records = torch.empty((num_rows, MAX_RECORDS, 3), dtype=torch.int32, device=logits.device)
    tiles = _scratch(num_rows, num_tiles, logits.device)
    if num_rows:
        sizes = num_columns, stride, num_tiles
        logprob_peak_kernel[(num_rows, num_tiles)](logits, metadata, tiles, *sizes[:2], **config())
        logprob_merge_kernel[(num_rows,)](metadata, tiles, num_tiles, **merge_config(num_columns))
        logprob_best_kernel[(num_rows, num_tiles)](logits, ids, metadata, tiles, *sizes, **config(), **LIMITS)
        logprob_record_kernel[(num_rows,)](
            logits, ids, metadata, tiles, records, stride, num_tiles, **record_config(num_columns)
        )
    return records


def _scratch(num_rows: int, num_tiles: int, device: torch.device) -> TileLogprobs:
    floats, numbers = {"dtype": torch.float32, "device": device}, {"dtype": torch.int32, "device": device}
    # Memory of its own each: a part of one tensor may begin anywhere, and a kernel is compiled anew for that.
    peaks, sums = (torch.empty((num_rows, num_tiles), **floats) for _ in range(2))
    above = torch.empty((num_rows, 1 + MAX_GIVEN, num_tiles), **numbers)
    best, best_ids = (torch.empty((num_rows, num_tiles, MAX_BEST), **numbers) for _ in range(2))
    num_found = torch.empty((num_rows, num_tiles), **numbers)
    log_sums, least = torch.empty(num_rows, **floats), torch.empty(num_rows, **numbers)
    return TileLogprobs(peaks, sums, log_sums, least, above, best, best_ids, num_found)
