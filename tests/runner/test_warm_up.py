"""What is computed before the first request leaves no trace."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from photon_grpc.config.flags import SchedulerConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.kv import KVPlan
from photon_grpc.errors import ConfigError
from photon_grpc.kernels import select
from photon_grpc.models import build, load
from photon_grpc.runner.buckets import LONG_BUCKETS
from photon_grpc.runner.capacity import largest_step
from photon_grpc.runner.warm_up import warm_up, warm_up_mixed
from tests.runner.models import greedy, model
from tests.runner.served import Served
from tests.runner.test_greedy import prompts


def test_steps_longer_than_any_graph_are_met_before_the_first_request() -> None:
    directory, reference = model("llama")
    served = Served(directory, scheduler=SchedulerConfig(max_num_seqs=24))
    runner = served.assembled.runner
    batches = []
    submit = runner.submit
    runner.submit = lambda batch: batches.append(batch) or submit(batch)  # type: ignore[method-assign]
    warm_up_mixed(runner, max_num_seqs=24, max_num_batched_tokens=4096, max_model_len=256)
    assert all(sum(batch.counts) > LONG_BUCKETS[-1] for batch in batches)
    assert [batch.counts.count(1) for batch in batches] == [0, 1, 2, 3, 4, 6, 8, 12]
    asked = prompts(5)
    assert served.complete(asked, 12) == [greedy(reference, prompt, 12) for prompt in asked]


def test_where_no_step_is_longer_nothing_is_computed() -> None:
    served = Served(model("llama")[0])
    served.assembled.runner.submit = None  # type: ignore[method-assign, assignment]
    warm_up_mixed(served.assembled.runner, max_num_seqs=24, max_num_batched_tokens=2048, max_model_len=256)
    warm_up_mixed(served.assembled.runner, max_num_seqs=4, max_num_batched_tokens=8192, max_model_len=256)


def test_a_step_that_cannot_be_computed_ends_the_start() -> None:
    runner = Served(model("llama")[0], scheduler=SchedulerConfig(max_num_seqs=24)).assembled.runner

    def no_memory(batch: object) -> None:
        raise RuntimeError("no memory")

    runner._launch_body = no_memory  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="1 sequences and 1 tokens"):
        warm_up(runner)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        warm_up_mixed(runner, max_num_seqs=24, max_num_batched_tokens=4096, max_model_len=256)


def test_a_largest_step_that_cannot_be_computed_is_told_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = model("llama")
    card, kernels = read_model_dir(directory), select("torch", "cpu")
    decoder = build(card, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels, max_model_len=256)
    load(decoder, card)
    monkeypatch.setattr(decoder, "forward", lambda *args: 1 / 0)
    with pytest.raises(ConfigError, match=r"4 sequences and 64 tokens.*--max-num-batched-tokens"):
        largest_step(decoder, kernels, KVPlan(decoder.kv_groups, 16), 4, 64)


def test_a_runner_that_is_let_go_leaves_no_tensors_to_the_collector() -> None:
    """Its slot table is hundreds of megabytes of a device, which are to be free for the KV cache at once."""
    gc.collect()
    gc.disable()
    try:
        served = Served(model("llama")[0])
        table = weakref.ref(served.assembled.runner._table)
        del served
        assert table() is None
    finally:
        gc.enable()
