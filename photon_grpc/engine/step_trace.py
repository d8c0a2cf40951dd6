"""Writes a line for every engine step: the computed rows, what began and ended, the state of the KV blocks.

The loop only collects numbers; another thread formats and writes them (trace_file.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Columns
from typing import Any, NamedTuple, Protocol

from msgspec.structs import asdict

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.expert_tally import ExpertTally
from photon_grpc.core.frames import Facts
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.scheduler import Scheduler
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder
from photon_grpc.engine.trace_file import TraceFile

#: Version of the format; readers refuse others.
VERSION = 1


class StepTrace(Protocol):
    """A record of steps that the Engine calls in this order in every turn."""

    def launching(self, batch: Batch, rows: Columns[Sequence]) -> None: ...

    def settled(self, output: StepOutput) -> None: ...

    def aborted(self, seq: Sequence, by_stop_string: bool) -> None: ...

    def turned(self, report: StepFrameBuilder, scheduler: Scheduler) -> None:
        """Record the end of a turn, with all that it reports to front ends."""

    def close(self) -> None:
        """End the trace."""


#: Front end, handle, first position, number of tokens, whether it decodes. A plain tuple, since every row has one.
_Row = tuple[int, int, int, int, bool]


class _Admitted(NamedTuple):
    """A sequence that gets a slot, for the first time or after a preemption."""

    frontend: int
    handle: int
    request_id: str
    output: int
    prompt_tokens: int
    #: Found in the prefix cache, or copied from another output.
    known_tokens: int
    queue_s: float


class _Step(NamedTuple):
    step: int
    start_s: float
    rows: list[_Row]
    admitted: list[_Admitted]


class _TurnEvents(NamedTuple):
    """The events since the last line, the numbers of KV blocks by state, and the length of the queue."""

    #: Front end, handle, reason.
    ended: list[tuple[int, int, str]]
    #: Front end, handle.
    preempted: list[tuple[int, int]]
    blocks: tuple[int, int, int, int]
    num_queued: int

    def fields(self) -> dict[str, Any]:
        """Return the fields of the line; called in the thread that writes it."""
        return {
            "queued": self.num_queued,
            "blocks": dict(zip(("owned", "cached", "limbo", "free"), self.blocks, strict=True)),
            "ended": [[f"{frontend}.{handle}", why] for frontend, handle, why in self.ended],
            "preempted": [f"{frontend}.{handle}" for frontend, handle in self.preempted],
        }


class JsonlStepTrace:
    """A trace with one JSON object per line and step. A sequence is named by front end and handle: "0.17"."""

    def __init__(self, file: TraceFile, facts: Facts) -> None:
        self._file = file
        self._zero_s = time.monotonic()
        self._launched: deque[_Step] = deque()
        self._settled: list[tuple[_Step, float, int, ExpertTally | None]] = []
        self._newest_step = 0
        #: Since the last line, as in _TurnEvents.
        self._ended: list[tuple[int, int, str]] = []
        self._preempted: list[tuple[int, int]] = []
        file.begin(
            {
                "trace": "photon-grpc",
                "version": VERSION,
                "time": time.time(),
                "device": facts.device,
                "num_blocks": facts.num_blocks,
                "block_size": facts.kv.block_size,
                "max_num_seqs": facts.max_num_seqs,
                "max_num_batched_tokens": facts.max_num_batched_tokens,
            }
        )

    def launching(self, batch: Batch, rows: Columns[Sequence]) -> None:
        traced: list[_Row] = []
        for seq, count, yields in zip(rows, batch.counts, batch.yields, strict=True):
            first = seq.num_computed - count
            for flight in seq.flights:
                first += flight.computes
            traced.append((seq.frontend, seq.handle, first, count, first >= seq.num_given and count == yields))
        admitted = [_admitted(seq) for seq in rows if seq.admitted_step == batch.step] if batch.admissions else []
        self._launched.append(_Step(batch.step, time.monotonic() - self._zero_s, traced, admitted))

    def settled(self, output: StepOutput) -> None:
        self._settled.append((self._launched.popleft(), output.duration_s, len(output.ids), output.experts))

    def aborted(self, seq: Sequence, by_stop_string: bool) -> None:
        self._ended.append((seq.frontend, seq.handle, "STOP_STRING" if by_stop_string else "CANCELLED"))

    def turned(self, report: StepFrameBuilder, scheduler: Scheduler) -> None:
        for frontend, columns in report.columns.items():
            self._ended += [(frontend, each.handle, each.reason.name) for each in columns.finished]
            self._ended += [(frontend, each.handle, each.fault.reason) for each in columns.failed]
            self._preempted += [(frontend, handle) for handle in columns.preempted]
        pool = scheduler.pool
        blocks = (pool.num_owned, pool.num_cached, pool.num_limbo, pool.num_free)
        num_queued = scheduler.live.num_queued
        for step, duration_s, num_ids, experts in self._settled:
            self._file.put((_line, step, duration_s, num_ids, experts, self._taken(blocks, num_queued)))
            self._newest_step = step.step
        self._settled.clear()
        if (self._ended or self._preempted) and not self._launched:
            # No step follows soon whose line could contain it.
            self._file.put((_line_after, self._newest_step, self._taken(blocks, num_queued)))

    def _taken(self, blocks: tuple[int, int, int, int], num_queued: int) -> _TurnEvents:
        """Return and forget what ended and what was preempted since the last line."""
        turn = _TurnEvents(self._ended, self._preempted, blocks, num_queued)
        self._ended, self._preempted = [], []
        return turn

    def close(self) -> None:
        self._file.close()


def _admitted(seq: Sequence) -> _Admitted:
    arrival_s = seq.request.arrival_s
    queue_s = max(0.0, (seq.first_scheduled_s or arrival_s) - arrival_s)
    request_id = seq.request.request_id
    return _Admitted(seq.frontend, seq.handle, request_id, seq.index, seq.num_given, seq.num_computed, queue_s)


def _line(
    step: _Step, duration_s: float, num_ids: int, experts: ExpertTally | None, turn: _TurnEvents
) -> dict[str, Any]:
    """Return the line of one step; called in the thread that writes it."""
    prefill = [_row(row) for row in step.rows if not row[-1]]
    decode = [_row(row) for row in step.rows if row[-1]]
    return {
        "step": step.step,
        "start_s": round(step.start_s, 6),
        "duration_s": round(duration_s, 6),
        "prefill_tokens": sum(num_tokens for _, _, num_tokens in prefill),
        "decode_tokens": sum(num_tokens for _, _, num_tokens in decode),
        "draft_tokens": sum(num_tokens - 1 for _, _, num_tokens in decode),
        "output_ids": num_ids,
        **({} if experts is None else {"experts": asdict(experts)}),
        "prefill": prefill,
        "decode": decode,
        "seated": [_name_admitted(each) for each in step.admitted],
        **turn.fields(),
    }


def _line_after(newest_step: int, turn: _TurnEvents) -> dict[str, Any]:
    """Return the line for what happened after the newest step, with no step in flight."""
    return {"after_step": newest_step, **turn.fields()}


def _row(row: _Row) -> tuple[str, int, int]:
    frontend, handle, first, num_tokens, _ = row
    return f"{frontend}.{handle}", first, num_tokens


def _name_admitted(each: _Admitted) -> dict[str, Any]:
    return {
        "sequence": f"{each.frontend}.{each.handle}",
        "request_id": each.request_id,
        "output": each.output,
        "prompt_tokens": each.prompt_tokens,
        "known_tokens": each.known_tokens,
        "queue_s": round(each.queue_s, 6),
    }
