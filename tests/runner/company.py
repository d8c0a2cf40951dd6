"""Rows that are sampled alone and in company, at every level: ids and log-probabilities to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams
from photon_grpc.core.request import SamplingParams
from photon_grpc.kernels import TORCH, Kernels
from photon_grpc.kernels.sampling import sample
from photon_grpc.runner.logprob_records import PromptLogprobRecorder
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from tests.kv_plans import kv_plan


class Asked(NamedTuple):
    """What one row asks for."""

    sampling: SamplingParams
    logprobs: LogprobParams = NO_LOGPROBS


_SCORED, _NAMED = LogprobParams(num_logprobs=4), LogprobParams(token_ids=(3, 0, 7))
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(0.8, seed=7)
#: Rows of every level, half of them scored.
ROWS = (
    Asked(GREEDY),
    Asked(GREEDY, _SCORED),
    Asked(DRAWN),
    Asked(DRAWN, _NAMED),
    Asked(SamplingParams(1.4, seed=2**64 - 3)),
    Asked(SamplingParams(1.1, top_k=9, seed=1)),
    Asked(SamplingParams(0.9, top_p=0.8, seed=2), _SCORED),
    Asked(SamplingParams(2.0, top_k=40, top_p=0.9, min_p=0.02, seed=3)),
    Asked(SamplingParams(0.7, repetition_penalty=1.3, frequency_penalty=0.37, presence_penalty=-0.21, seed=4)),
    Asked(SamplingParams(temperature=0.0, frequency_penalty=0.7), _SCORED),
    Asked(SamplingParams(1.0, logit_bias=((3, 2.5), (11, -7.3)), seed=5), _NAMED),
    Asked(SamplingParams(0.9, top_p=0.9, repetition_penalty=0.8, seed=6)),
)
#: The context of every row, of which three ids are the prompt.
CONTEXT = (3, 9, 3, 11, 0, 11, 11, 7)


class Head:
    """The head of a model whose hidden states are logits."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    def sample(self, hidden: torch.Tensor, metadata: sample.SamplingMetadata) -> torch.Tensor:
        return self._kernels.sample(hidden.clone(), metadata, None)


class Company:
    """Rows in the slots of one table, and their sampler.

    Args:
        chosen: numbers of ROWS.
        kernels: the kernels that sample.
        logits: [len(ROWS), V], those of every row.
    """

    def __init__(self, chosen: Sequence[int], kernels: Kernels, logits: torch.Tensor) -> None:
        device, slots = logits.device, tuple(range(1, len(chosen) + 1))
        self.kernels, self.logits, self.chosen = kernels, logits[list(chosen)], chosen
        self.table = SlotTable(len(chosen) + 1, 64, kv_plan(8), logits.shape[1], device)
        self.batch = Batch(1, slots, (1,) * len(slots), (1,) * len(slots), admissions=tuple(map(self._admitted, slots)))
        self.table.apply(self.batch)
        self.sampler = Sampler(Head(kernels), self.table, kernels)
        # In the interpreter kernels run as on a device.
        self.sampler._on_cpu = kernels is TORCH

    def _admitted(self, slot: int) -> Admission:
        asked, more = ROWS[self.chosen[slot - 1]], {"output_index": self.chosen[slot - 1] % 3}
        return Admission(slot, CONTEXT, 3, len(CONTEXT) - 1, ((1,),), asked.sampling, logprobs=asked.logprobs, **more)

    def sampled(self, level: SamplingLevel | None = None) -> dict[int, tuple[int, bytes]]:
        """Map each row to its id and its records, at `level` (None: that of the batch)."""
        level = self.sampler.level(self.batch) if level is None else level
        slots = torch.tensor(self.batch.slots, device=self.logits.device)
        ids, records = self.sampler(self.logits.clone(), slots, torch.full_like(slots, len(CONTEXT)), level)
        sizes = [ROWS[number].logprobs.num_records if records is not None else 0 for number in self.chosen]
        packed = [records[row, :size].cpu().numpy().tobytes() if size else b"" for row, size in enumerate(sizes)]  # type: ignore[index]
        return dict(zip(self.chosen, zip(ids.tolist(), packed, strict=True), strict=True))


def alone(number: int, kernels: Kernels, logits: torch.Tensor) -> tuple[int, bytes]:
    return Company([number], kernels, logits).sampled()[number]


def check_company(
    chosen: Sequence[int], expected: dict[int, tuple[int, bytes]], kernels: Kernels, logits: torch.Tensor
) -> None:
    """Check that these rows, in this order, get what each gets alone, at their level and at every one above it."""
    company = Company(chosen, kernels, logits)
    lowest = company.sampler.level(company.batch)
    for level in SamplingLevel:
        serves = level.is_filtered >= lowest.is_filtered and level.is_processed >= lowest.is_processed
        if serves and level.has_logprobs >= lowest.has_logprobs:
            for number, (token, records) in company.sampled(level).items():
                assert token == expected[number][0], (level, number)
                # Without them no row has been asked for log-probabilities.
                assert records == (expected[number][1] if level.has_logprobs else b""), (level, number)


def check_prompt_logprobs(kernels: Kernels, logits: torch.Tensor, counts: Sequence[int]) -> None:
    """Check that a prompt's log-probabilities are those of the same ids while they are generated, to the last bit.

    `logits` [T, V]: those of `counts` tokens of each prompt, prompt after prompt.
    """
    params, device, num_slots = LogprobParams(num_logprobs=5, num_prompt_logprobs=5), logits.device, len(counts) + 1
    starts = [0, *itertools.accumulate(counts)]
    best = logits.argmax(-1).tolist()
    table = SlotTable(num_slots, 512, kv_plan(8), logits.shape[1], device)
    # Each id of a prompt is the one that its logits would generate.
    prompts = [(1, *best[start : start + count]) for start, count in zip(starts, counts, strict=False)]
    admissions = tuple(
        Admission(slot, prompt, len(prompt), 0, ((1,),), GREEDY, logprobs=params)
        for slot, prompt in enumerate(prompts, 1)
    )
    slots, rows = tuple(range(1, num_slots)), tuple((row, 1) for row in range(len(counts)))
    batch = Batch(1, slots, tuple(counts), (0,) * len(slots), admissions=admissions, prompt_logprob_rows=rows)
    table.apply(batch)
    found = PromptLogprobRecorder(Head(kernels), table, kernels)(batch, logits)
    sampler = Sampler(Head(kernels), table, kernels)
    for at in range(len(logits)):
        one = torch.ones(1, dtype=torch.int64, device=device)
        sampled = sampler(logits[at : at + 1], one, one * 9, SamplingLevel.PLAIN_LOGPROBS)
        assert sampled.logprobs is not None
        assert torch.equal(found.records[at].cpu(), sampled.logprobs[0, : params.num_records].cpu())
