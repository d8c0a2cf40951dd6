"""Log-probabilities on a GPU: the kernels at real vocabularies against sorting, and records of whole steps.

In float32 the records are those of a CPU, from graphs and launched one by one, without waiting for the device.
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.logprobs import RECORD, LogprobParams
from photon_grpc.core.ports import Pending
from photon_grpc.kernels.sampling import logprobs
from photon_grpc.runner.model_runner import ModelRunner
from tests.gpu.test_waits_on_gpu import waiting_is_an_error
from tests.kernels.scored import asking
from tests.runner.models import model
from tests.runner.scored import GREEDY, LONG, ROWS, admission, batches
from tests.runner.served import Served

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_rows", [1, 8, 65])
@pytest.mark.parametrize("num_columns", [320, 32000, 128256, 151936])
def test_kernels_give_the_records_of_the_reference(num_columns: int, num_rows: int) -> None:
    torch.manual_seed(num_columns + num_rows)
    logits, ids = torch.randn(num_rows, num_columns) * 4, torch.randint(0, num_columns, (num_rows,))
    # Few different values, one value, many that cannot be sampled.
    logits[1::4] = logits[1::4].round()
    logits[2::8] = 1.5
    logits[3::8, 30:] = -torch.inf
    asked = asking(num_rows, num_columns)
    theirs = logprobs.reference(logits, ids, asked)
    mine = logprobs.launch(logits.cuda(), ids.cuda(), logprobs.LogprobMetadata(*(each.cuda() for each in asked))).cpu()
    for row, slot in enumerate(asked.slots.tolist()):
        num_best, num_given = int(asked.num_best[slot]), int(asked.num_given[slot])
        if num_best >= 0:
            found, expected = (each[row, : 1 + num_best + num_given] for each in (mine, theirs))
            assert torch.equal(found[:, [0, 2]], expected[:, [0, 2]])
            mine_logprobs, their_logprobs = (each.view(torch.float32)[:, 1] for each in (found, expected))
            torch.testing.assert_close(mine_logprobs, their_logprobs, atol=2e-5, rtol=1e-6)


def test_a_row_s_records_are_the_same_in_any_batch() -> None:
    logits, ids, asked = torch.randn(64, 128256, device="cuda"), torch.arange(64).cuda(), asking(64, 128256, "cuda")
    asked = asked._replace(slots=torch.full_like(asked.slots, 3))
    together = logprobs.launch(logits, ids, asked)
    alone = logprobs.launch(logits[7:8], ids[7:8], asked._replace(slots=asked.slots[7:8]))
    num_records = int(1 + asked.num_best[3] + asked.num_given[3])
    assert torch.equal(together[7, :num_records], alone[0, :num_records])


def runner_on(device: str, eager: bool) -> ModelRunner:
    served = Served(
        model("llama")[0],
        device=device,
        eager=eager,
        dtype="float32",
        cache=CacheConfig(block_size=8, num_blocks=100),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    return served.assembled.runner  # type: ignore[return-value]


def steps() -> list[Batch]:
    """Return steps of every sampling level beside rows without log-probabilities, then a prompt in two chunks."""
    entered = admission(7, LONG, GREEDY, LogprobParams(num_logprobs=1, num_prompt_logprobs=3))
    others, ones = tuple(range(1, len(ROWS) + 1)), (1,) * len(ROWS)
    first = Batch(10, (*others, 7), (*ones, 40), (*ones, 0), admissions=(entered,), prompt_logprob_rows=((6, 1),))
    return [*batches(ROWS), first, Batch(11, (*others, 7), (*ones, 20), (*ones, 1), prompt_logprob_rows=((6, 41),))]


def launched(runner: ModelRunner) -> list[Pending]:
    return [runner.submit(batch) for batch in steps()]


def assert_same(outputs: list[StepOutput], expected: list[StepOutput]) -> None:
    assert [output.ids for output in outputs] == [output.ids for output in expected]
    for mine, theirs in zip(outputs, expected, strict=True):
        for found, wanted in ((mine.logprobs, theirs.logprobs), (mine.prompt_logprobs, theirs.prompt_logprobs)):
            assert found.keys() == wanted.keys()
            for row in found:
                pairs = list(zip(RECORD.iter_unpack(found[row]), RECORD.iter_unpack(wanted[row]), strict=True))
                assert [(a[0], a[2]) for a, _ in pairs] == [(b[0], b[2]) for _, b in pairs]
                assert [a[1] for a, _ in pairs] == pytest.approx([b[1] for _, b in pairs], abs=1e-4)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_records_are_those_of_a_cpu(eager: bool) -> None:
    expected = [each.result() for each in launched(runner_on("cpu", True))]
    assert any(output.logprobs for output in expected) and any(output.prompt_logprobs for output in expected)
    runner = runner_on("cuda", eager)
    # Once before: kernels are loaded when they are first met.
    assert_same([each.result() for each in launched(runner)], expected)
    with waiting_is_an_error():
        pending = launched(runner)
    assert_same([each.result() for each in pending], expected)
