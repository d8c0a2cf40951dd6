"""Steps launched operation by operation: how many rows of logits are computed at a time changes nothing."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.batch import Admission, Batch, StepOutput
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.request import SamplingParams
from photon_grpc.kernels import select
from photon_grpc.models import Decoder, build, load
from photon_grpc.runner.eager import EagerLaunch
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.sampler import Sampler, SamplingLevel
from photon_grpc.runner.slot_table import SlotTable
from photon_grpc.runner.step import Step
from tests.runner.models import model

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.3, top_k=9, seed=4),
    SamplingParams(temperature=0.7, top_p=0.8, min_p=0.01, seed=5),
    SamplingParams(temperature=1.1, seed=6),
]


class Counted(Sampler):
    """A head that counts the rows it was called with."""

    def __init__(self, decoder: Decoder, table: SlotTable) -> None:
        super().__init__(decoder, table, select("torch", "cpu"))
        self.num_rows: list[int] = []

    def __call__(
        self, hidden: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, level: SamplingLevel
    ) -> torch.Tensor:
        assert len(hidden) == len(slots) == len(context_len)
        self.num_rows.append(len(slots))
        return super().__call__(hidden, slots, context_len, level)


def play(row_buckets: tuple[int, ...], batches: list[Batch]) -> tuple[list[StepOutput], SlotTable, list[int]]:
    """Return what the batches give, the table they leave, and how many rows were sampled for in each step."""
    device, kernels = torch.device("cpu"), select("torch", "cpu")
    card = read_model_dir(model("llama")[0])
    decoder = build(card, dtype=torch.float32, device=device, kernels=kernels, max_model_len=64)
    load(decoder, card)
    cache = KVCache(KVPlan(decoder.kv_groups, 8), 20, device)
    table = SlotTable(len(SAMPLINGS) + 1, 64, cache.plan, decoder.vocab_size, device)
    step = Step(decoder, table, cache.pages, kernels, max_rows=len(SAMPLINGS))
    step.sampler = sampler = Counted(decoder, table)
    runner = ModelRunner(EagerLaunch(step, row_buckets), table, cache, depth=0)
    outputs = [runner.submit(batch).result() for batch in batches]
    return outputs, table, sampler.num_rows


@pytest.mark.parametrize(
    ("row_buckets", "num_rows"),
    [((4, 8), [4, 8, 4, 4]), ((1, 2, 3, 4, 5), [4, 5, 1, 3]), ((2,), [4, 5, 2, 3])],
    ids=["padded", "exact", "more than the largest"],
)
def test_rows_up_to_a_bucket_change_no_output(row_buckets: tuple[int, ...], num_rows: list[int]) -> None:
    admissions = tuple(
        Admission(slot, tuple(range(slot, slot + 4)), 4, 0, ((2 * slot, 2 * slot + 1),), sampling)
        for slot, sampling in enumerate(SAMPLINGS, 1)
    )
    slots, ones = (1, 2, 3, 4, 5), (1,) * 5
    batches = [
        # The third is in the middle of its prompt.
        Batch(1, slots, (4, 4, 3, 4, 4), (1, 1, 0, 1, 1), admissions=admissions),
        Batch(2, slots, ones, ones),
        Batch(3, (5,), (1,), (1,)),
        Batch(4, (4, 1, 2), (1, 1, 1), (1, 1, 1)),
    ]
    outputs, table, sampled_for = play(row_buckets, batches)
    expected, other, plain = play((), batches)
    assert (sampled_for, plain) == (num_rows, [4, 5, 1, 3])
    assert [output.ids for output in outputs] == [output.ids for output in expected]
    assert not any(output.faults for output in outputs)
    assert torch.equal(table.token_ids[1:], other.token_ids[1:]) and torch.equal(
        table.numbers.num_computed, other.numbers.num_computed
    )


def test_a_step_of_which_no_row_yields_samples_nothing() -> None:
    admission = Admission(1, (1, 2, 3), 3, 0, ((1,),), SAMPLINGS[1])
    outputs, table, sampled_for = play((4,), [Batch(1, (1,), (2,), (0,), admissions=(admission,))])
    assert outputs[0].ids == () and sampled_for == [] and table.numbers.num_computed[1] == 2
