"""The Batch being planned, and what the Scheduler must remember of it until it settles."""

from __future__ import annotations

from collections.abc import Collection

from photon_grpc.core.batch import DRAFT_COUNTS, Admission, Batch, Growth
from photon_grpc.core.sequence import Flight, Sequence
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.scheduler.prompt_scoring import PendingPromptLogprobs


class BatchBuilder:
    """The columns of a Batch, and the sequences in its rows."""

    __slots__ = (
        "step",
        "budget",
        "pool",
        "drafts",
        "rows",
        "slots",
        "counts",
        "yields",
        "admissions",
        "grown",
        "copies",
        "given",
        "published",
    )

    def __init__(self, step: int, budget: int, pool: BlockPool, drafts: int = 0) -> None:
        self.step = step
        #: Tokens that may still be added.
        self.budget = budget
        self.pool = pool
        self.drafts = drafts
        self.rows: list[Sequence] = []
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.yields: list[int] = []
        self.admissions: list[Admission] = []
        self.grown: list[Growth] = []
        self.copies: list[tuple[int, int]] = []
        #: (slot, first drafts of its row).
        self.given: list[tuple[int, tuple[int, ...]]] = []
        #: Row -> blocks that were published before this step has filled them.
        self.published: dict[int, list[int]] = {}

    def place(self, seq: Sequence, count: int, end: int, yields: int) -> None:
        """Add a row that computes `count` tokens, up to the length `end`, and yields at most `yields` ids."""
        self.rows.append(seq)
        self.slots.append(seq.slot)
        self.counts.append(count)
        self.yields.append(yields)
        self.budget -= count
        seq.flights.append(Flight(self.step, count, yields))
        seq.last_step = self.step
        if end >= seq.table.publish_at and end <= len(seq.ids):
            # All ids of these blocks are known, and the step writes them before any of its rows attends to them.
            self.published[len(self.rows) - 1] = self.pool.publish(seq, end)

    def freeze(self, left: list[int], constrained: Collection[Sequence], scoring: PendingPromptLogprobs) -> Batch:
        """Return the Batch, in which rows of `constrained` sequences wait for masks."""
        yields, masked = tuple(self.yields), []
        if constrained:
            masked = [row for row, seq in enumerate(self.rows) if yields[row] and seq in constrained]
        return Batch(
            step=self.step,
            slots=tuple(self.slots),
            counts=tuple(self.counts),
            yields=yields,
            left=tuple(left),
            admissions=tuple(self.admissions),
            grown=tuple(self.grown),
            copies=tuple(self.copies),
            drafts=self._stride(max(yields) - 1) if self.drafts else 0,
            masked=tuple(masked),
            prompt_logprob_rows=scoring.take_rows(self.rows) if scoring.unscored else (),
            given=tuple(self.given),
        )

    def _stride(self, most: int) -> int:
        """Return the least number of drafts that a runner has a shape for, and that holds `most`."""
        return next((count for count in (0, *DRAFT_COUNTS) if most <= count < self.drafts), self.drafts)

    def published_by(self, seq: Sequence) -> list[int]:
        """Return the blocks of one sequence that were published before this step has filled them."""
        return [block for row, blocks in self.published.items() if self.rows[row] is seq for block in blocks]
