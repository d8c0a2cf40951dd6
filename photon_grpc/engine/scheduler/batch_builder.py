"""The Batch while it is being chosen, and what the Scheduler must remember of it until it settles."""

from __future__ import annotations

from photon_grpc.core.batch import Admission, Growth
from photon_grpc.core.sequence import Sequence


class BatchBuilder:
    """Columns over the rows, as in Batch, and the sequences that they are."""

    __slots__ = ("step", "budget", "rows", "slots", "counts", "yields", "admissions", "grown", "copies", "published")

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.rows: list[Sequence] = []
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.yields: list[int] = []
        self.admissions: list[Admission] = []
        self.grown: list[Growth] = []
        self.copies: list[tuple[int, int]] = []
        #: Row -> blocks that became known before this step has filled them.
        self.published: dict[int, list[int]] = {}

    def published_by(self, seq: Sequence) -> list[int]:
        """Blocks of one sequence that became known before this step has filled them."""
        return [block for row, blocks in self.published.items() if self.rows[row] is seq for block in blocks]
