"""A drafter that knows every output beforehand, and is right as often as it is told to be; it never asks the device."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.ports import Pending
from photon_grpc.runner.drafting import Drafter, NoDrafter, drafting_rows
from photon_grpc.runner.model_runner import ModelRunner


class Key(NamedTuple):
    """What an output depends on."""

    prompt: tuple[int, ...]
    seed: int
    output: int

    @classmethod
    def of(cls, admission: Admission) -> Key:
        return cls(admission.ids[: admission.num_prompt], admission.sampling.seed, admission.output_index)


class NoDrafts(NoDrafter):
    """A drafter that leaves what stands behind the known ids."""

    def draft(self, batch: Batch) -> None:
        """Do nothing."""


class KnownAnswers(NoDrafter):
    """Drafts of a runner from known outputs.

    Args:
        runner: the runner, whose drafter this becomes; its steps must allow `max_drafts`.
        answers: the ids of each output.
        acceptance: the share of right drafts.
        is_dear: whether the runner's own drafter drafts as well, for what that costs.
    """

    def __init__(
        self,
        runner: ModelRunner,
        answers: Mapping[Key, Sequence[int]],
        acceptance: float,
        *,
        is_dear: bool = False,
    ) -> None:
        self.max_drafts = runner.drafter.max_drafts
        self._runner = runner
        rng = random.Random(5)
        table = runner.table
        self._table = table
        #: What is drafted for every position of a slot.
        self._drafts = torch.zeros_like(table.token_ids)
        #: Output -> its row in `_known`, which is on the device before a request comes: an admission costs one copy.
        self._row_of = {key: row for row, key in enumerate(answers)}
        known = torch.zeros((len(answers) + 1, self._drafts.shape[1]), dtype=torch.int32)
        for row, (key, answer) in enumerate(answers.items()):
            ids = [token if rng.random() < acceptance else token ^ 1 for token in (*key.prompt, *answer)]
            known[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self._known = known.to(table.device)
        self._numbers = torch.arange(self.max_drafts, device=table.device)
        self._before = runner.drafter
        self._works: Drafter = runner.drafter if is_dear else NoDrafts()
        self._submit = runner.submit
        runner.drafter = self
        runner.submit = self.submit  # type: ignore[method-assign]

    def restore(self) -> None:
        """Give the runner its drafter back."""
        self._runner.drafter = self._before
        self._runner.submit = self._submit  # type: ignore[method-assign]

    def submit(self, batch: Batch) -> Pending:
        with torch.inference_mode():
            if batch.admissions:
                rows = [self._row_of.get(Key.of(each), len(self._row_of)) for each in batch.admissions]
                slots = [each.slot for each in batch.admissions]
                sent = self._table.to_device((*slots, *rows), torch.int64).view(2, len(rows))
                self._drafts[sent[0]] = self._known[sent[1]]
        return self._submit(batch)

    @torch.inference_mode()
    def draft(self, batch: Batch) -> None:
        self._works.draft(batch)
        slots, counts = drafting_rows(batch, self._table)
        places = (self._table.numbers.num_known[slots][:, None] + self._numbers).clamp(max=self._drafts.shape[1] - 1)
        rows = slots[:, None].expand_as(places)
        ids = self._table.token_ids
        ids[rows, places] = torch.where(self._numbers < counts[:, None], self._drafts[rows, places], ids[rows, places])

    def ingest(self, batch: Batch) -> None:
        self._works.ingest(batch)
