"""What is computed before the first request leaves no trace."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from photon_grpc.config.flags import SchedulerConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.config.sizes import Sizes
from photon_grpc.core.batch import Batch
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.ports import Pending
from photon_grpc.errors import ConfigError
from photon_grpc.kernels import TORCH, TRITON, Kernels, select
from photon_grpc.models import build, load
from photon_grpc.runner import start
from photon_grpc.runner.buckets import LONG_BUCKETS
from photon_grpc.runner.sampler import SamplingLevel
from photon_grpc.runner.start import RunnerLimits, RunnerStart
from photon_grpc.runner.warm_up import largest_step, warm_up, warm_up_drafts, warm_up_mixed
from tests.runner.launched import step_of
from tests.runner.models import greedy, model
from tests.runner.served import Served
from tests.runner.test_greedy import prompts


def sizes(max_num_seqs: int, max_num_batched_tokens: int) -> Sizes:
    return Sizes(256, 16, max_num_seqs, max_num_batched_tokens, max_num_batched_tokens, 0)


def test_a_token_is_sampled_at_every_level_before_the_first_request() -> None:
    directory, reference = model("llama")
    served = Served(directory)
    runner, met = served.assembled.runner, []
    sampler = step_of(runner).sampler
    level = sampler.level

    def seen(batch: Batch) -> SamplingLevel:
        met.append(level(batch))
        return met[-1]

    sampler.level = seen
    assert warm_up(runner) > 0.0  # type: ignore[arg-type]
    assert met == list(reversed(SamplingLevel))
    asked = prompts(1)
    assert served.complete(asked, 12) == [greedy(reference, prompt, 12) for prompt in asked]
    assert not (runner.table.filtered or runner.table.banned or runner.table.logprob_params)  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_steps_with_drafts_of_all_numbers_of_rows_leave_no_trace(drafter: str) -> None:
    directory, reference = model("llama")
    served = Served(directory, speculation=str(directory) if drafter == "model" else drafter, num_drafts=3)
    runner, met = served.assembled.runner, []
    submit = runner.submit

    def seen(batch: Batch) -> Pending:
        met.append((len(batch.slots), batch.drafts))
        return submit(batch)

    runner.submit = seen  # type: ignore[method-assign]
    warm_up_drafts(runner, sizes(8, 64))  # type: ignore[arg-type]
    assert {rows for rows, drafts in met if drafts} == {1, 2, 4, 8}
    asked = prompts(2)
    assert served.complete(asked, 12) == [greedy(reference, prompt, 12) for prompt in asked]
    assert not (runner.table.filtered or runner.table.processed)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("device", "kernels", "enforce_eager", "is_captured"),
    [
        ("cuda", TRITON, False, True),
        ("cuda", TRITON, True, False),
        ("cuda", TORCH, False, False),
        ("cpu", TRITON, False, False),
    ],
)
def test_graphs_are_captured_where_nothing_forbids_it(
    monkeypatch: pytest.MonkeyPatch, device: str, kernels: Kernels, enforce_eager: bool, is_captured: bool
) -> None:
    """Under --kernels torch a step asks the device for lengths, which a capture forbids: not one shape is tried."""
    made = []
    for name in ("eager_runner", "graph_runner"):
        monkeypatch.setattr(start, name, lambda *args, name=name, **options: made.append(name))
    monkeypatch.setattr(RunnerStart, "_kv_cache", lambda *args: None)
    limits = RunnerLimits(sizes(8, 64), may_capture=not enforce_eager)
    decoder = SimpleNamespace(device=torch.device(device), kernels=kernels)
    RunnerStart(limits, lambda *now: None, 1)._runner(decoder, 1, None)  # type: ignore[arg-type]
    assert made == ["graph_runner" if is_captured else "eager_runner"]


@pytest.mark.parametrize(("kernels", "num_blocks"), [(TRITON, 5), (TORCH, 7)])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_of_the_longest_contexts_have_room_beside_blocks(
    monkeypatch: pytest.MonkeyPatch, kernels: Kernels, num_blocks: int, enforce_eager: bool
) -> None:
    """Whether steps are captured or not: what lanes take for them is not measured."""
    memory = {"mem_get_info": (1000, 1000), "memory_allocated": 100, "max_memory_allocated": 150}
    for name, found in (memory | dict.fromkeys(("reset_peak_memory_stats", "synchronize", "empty_cache"))).items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, found=found: found)
    plan = SimpleNamespace(groups=[None], block_bytes=100)
    monkeypatch.setattr(RunnerStart, "_plan", lambda *args: plan)
    monkeypatch.setattr(RunnerStart, "_largest_step", lambda *args: None)
    attention = SimpleNamespace(lane_bytes=lambda num_tokens, longest: 200 if (num_tokens, longest) == (8, 256) else 0)
    decoder = SimpleNamespace(device="cuda", kernels=kernels, layers=[SimpleNamespace(attention=attention)])
    limits = RunnerLimits(sizes(8, 64), gpu_memory_utilization=0.9, may_capture=not enforce_eager)
    start = RunnerStart(limits, lambda *now: None, 1)
    assert start._blocks_on_cuda(decoder) == num_blocks  # type: ignore[arg-type]
    plan.block_bytes = 500
    with pytest.raises(ConfigError, match=r"the largest step takes 0; lower .*--max-model-len"):
        start._blocks_on_cuda(decoder)  # type: ignore[arg-type]


def test_steps_longer_than_any_graph_are_met_before_the_first_request() -> None:
    directory, reference = model("llama")
    served = Served(directory, scheduler=SchedulerConfig(max_num_seqs=24))
    runner = served.assembled.runner
    batches = []
    submit = runner.submit
    runner.submit = lambda batch: batches.append(batch) or submit(batch)  # type: ignore[method-assign]
    warm_up_mixed(runner, sizes(24, 4096))
    assert all(sum(batch.counts) > LONG_BUCKETS[-1] for batch in batches)
    assert [batch.counts.count(1) for batch in batches] == [0, 1, 2, 3, 4, 6, 8, 12]
    asked = prompts(5)
    assert served.complete(asked, 12) == [greedy(reference, prompt, 12) for prompt in asked]


def test_where_no_step_is_longer_nothing_is_computed() -> None:
    served = Served(model("llama")[0])
    served.assembled.runner.submit = None  # type: ignore[method-assign, assignment]
    warm_up_mixed(served.assembled.runner, sizes(24, 2048))
    warm_up_mixed(served.assembled.runner, sizes(4, 8192))


def test_a_step_that_cannot_be_computed_ends_the_start() -> None:
    runner = Served(model("llama")[0], scheduler=SchedulerConfig(max_num_seqs=24)).assembled.runner

    def no_memory(batch: object) -> None:
        raise RuntimeError("no memory")

    runner.launch_body = no_memory  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="1 sequences and 1 tokens"):
        warm_up(runner)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        warm_up_mixed(runner, sizes(24, 4096))


def test_a_largest_step_that_cannot_be_computed_is_told_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = model("llama")
    card, kernels = read_model_dir(directory), select("torch", "cpu")
    decoder = build(card, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels, max_model_len=256)
    load(decoder, card)
    monkeypatch.setattr(decoder, "forward", lambda *args: 1 / 0)
    with pytest.raises(ConfigError, match=r"4 sequences and 64 tokens.*--max-num-batched-tokens"):
        largest_step(decoder, KVPlan(decoder.kv_groups, 16), sizes(4, 64))


def test_a_runner_that_is_let_go_leaves_no_tensors_to_the_collector() -> None:
    """Its slot table is hundreds of megabytes of a device, which are to be free for the KV cache at once."""
    gc.collect()
    gc.disable()
    try:
        served = Served(model("llama")[0])
        table = weakref.ref(served.assembled.runner.table)
        del served
        assert table() is None
    finally:
        gc.enable()
