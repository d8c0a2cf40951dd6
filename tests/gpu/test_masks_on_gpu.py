"""Masked rows on a GPU, in float32: the ids of a CPU, from graphs and launched one by one.

No step waits for the device.
"""

from __future__ import annotations

import pytest
import torch

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.batch import NOTHING_TO_SAMPLE
from photon_grpc.core.ports import Pending
from photon_grpc.runner.model_runner import ModelRunner
from tests.gpu.test_waits_on_gpu import waiting_is_an_error
from tests.runner.masks import ALLOWED, MASKED, batches, masks
from tests.runner.models import model
from tests.runner.served import Served

pytestmark = pytest.mark.gpu


def runner_on(device: str, eager: bool) -> ModelRunner:
    served = Served(
        model("llama")[0],
        device=device,
        eager=eager,
        dtype="float32",
        cache=CacheConfig(block_size=8, num_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    return served.assembled.runner  # type: ignore[return-value]


def launched(runner: ModelRunner) -> list[Pending]:
    pending = []
    for batch, allowed in zip(batches(MASKED), (*ALLOWED, ()), strict=True):
        pending.append(runner.submit(batch))
        if batch.masked:
            pending[-1].sample(masks(*allowed))
    return pending


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_masked_ids_are_those_of_a_cpu(eager: bool) -> None:
    expected = [each.result().ids for each in launched(runner_on("cpu", True))]
    runner = runner_on("cuda", eager)
    # Once before: kernels are loaded when they are first met.
    assert [each.result().ids for each in launched(runner)] == expected
    with waiting_is_an_error():
        pending = launched(runner)
    assert [each.result().ids for each in pending] == expected


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_a_mask_that_allows_nothing_is_a_fault_of_its_row(eager: bool) -> None:
    runner = runner_on("cuda", eager)
    expected = runner.submit(batches(())[0]).result().ids
    pending = runner.submit(batches(MASKED)[0])
    pending.sample(masks(range(320), (), range(320)))
    assert pending.result().ids == (*expected[:2], NOTHING_TO_SAMPLE, *expected[3:])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_masks_leave_no_flag_behind(device: str) -> None:
    runner = runner_on(device, False)
    for each in launched(runner):
        each.result()
    assert not torch.any(runner.table.numbers.mask_row)
