"""Launches in the exact shape of a batch, kernel by kernel."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import torch

from photon_grpc.core.batch import Batch
from photon_grpc.runner.step import (
    Bounds,
    Rows,
    SampledRows,
    SamplePositions,
    Step,
    StepShape,
    StepTensors,
    Tail,
    is_decode,
    is_verify,
)


class EagerLaunch:
    """Launches of any batch, without a graph.

    Args:
        step: the step that is launched.
        row_buckets: the numbers of rows that are sampled; the next larger one is taken, since a device loads a kernel
            at the first use of a shape, which takes longer than the step. Empty: as many rows as yield.
    """

    def __init__(self, step: Step, row_buckets: tuple[int, ...] = ()) -> None:
        self._step = step
        self._row_buckets = row_buckets

    def __call__(self, batch: Batch) -> Tail:
        return self._verify(batch) if batch.drafts else self._plain(batch)

    def _plain(self, batch: Batch) -> Tail:
        step, level = self._step, self._step.sampler.level(batch)
        yielding = [row for row, yields in enumerate(batch.yields) if yields]
        rows, to_sample = self._send(batch, yielding)
        shape = StepShape("decode" if is_decode(batch) else "mixed", sum(batch.counts), len(batch.slots))
        tokens, last = step.body(rows, shape, self._bounds(batch))
        prompts = step.record_prompts(batch, tokens)

        def tail() -> StepTensors:
            return StepTensors(step.tail(rows, last, level, to_sample), to_sample and yielding, prompts)

        return tail

    def _verify(self, batch: Batch) -> Tail:
        step, level = self._step, self._step.sampler.level(batch)
        rows, draws = self._send_draws(batch)
        shape = StepShape("verify" if is_verify(batch) else "mixed", sum(batch.counts), len(batch.slots))
        tokens, states = step.verify(rows, draws, shape, self._bounds(batch))
        prompts = step.record_prompts(batch, tokens)

        def tail() -> StepTensors:
            sampled, lengths = step.accepting_tail(rows, draws, states, level)
            return StepTensors(sampled, None, prompts, lengths)

        return tail

    def _send_draws(self, batch: Batch) -> tuple[Rows, SamplePositions]:
        """Return the batch's columns and the positions at which it samples, on the device."""
        num_rows, num_draws = len(batch.slots), sum(batch.yields)
        ends = list(accumulate(batch.counts))
        tokens = [at for end, yields in zip(ends, batch.yields, strict=True) for at in range(end - yields, end)]
        slots = [slot for slot, yields in zip(batch.slots, batch.yields, strict=True) for _ in range(yields)]
        # As in `_send`.
        odd, odd_draws = (0,) * (num_rows % 2), (0,) * (num_draws % 2)
        columns = (*batch.slots, *odd, *batch.counts, *odd, *batch.yields, *odd, *tokens, *odd_draws, *slots)
        sent = self._step.table.to_device(columns, torch.int64)
        size = num_rows + len(odd)
        context_len = torch.empty(num_rows, dtype=torch.int32, device=sent.device)
        rows = Rows(*sent[: 3 * size].view(3, size)[:, :num_rows], context_len)
        of_draws = sent[3 * size :]
        before = torch.empty(num_draws, dtype=torch.int32, device=sent.device)
        return rows, SamplePositions(of_draws[:num_draws], of_draws[num_draws + len(odd_draws) :], before)

    def _send(self, batch: Batch, yielding: list[int]) -> tuple[Rows, SampledRows | None]:
        """Return the batch's columns on the device, and the rows to sample if they are not all rows once."""
        num_rows, num_sampled = len(batch.slots), self._bucket(len(yielding))
        has_all = num_rows == len(yielding) == num_sampled
        chosen = () if has_all else (*yielding, *(0,) * (num_sampled - len(yielding)))
        # Every column begins at a multiple of 16 bytes: a kernel is compiled anew for pointers that do not.
        odd = (0,) * (num_rows % 2)
        columns = (*batch.slots, *odd, *batch.counts, *odd, *batch.yields, *odd, *chosen)
        sent = self._step.table.to_device(columns, torch.int64)
        size = num_rows + len(odd)
        context_len = torch.empty(num_rows, dtype=torch.int32, device=sent.device)
        rows = Rows(*sent[: 3 * size].view(3, size)[:, :num_rows], context_len)
        return rows, None if has_all else SampledRows(sent[3 * size :], len(yielding))

    def _bounds(self, batch: Batch) -> Bounds:
        computed = self._step.table.max_computed
        longest = max(computed[slot] + count for slot, count in zip(batch.slots, batch.counts, strict=True))
        return Bounds(max(batch.counts), min(batch.counts), longest)

    def _bucket(self, num_rows: int) -> int:
        at = bisect_left(self._row_buckets, num_rows)
        return self._row_buckets[at] if num_rows and at < len(self._row_buckets) else num_rows
