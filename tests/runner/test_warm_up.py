"""What is computed before the first request leaves no trace."""

from __future__ import annotations

from photon_grpc.config.flags import SchedulerConfig
from photon_grpc.runner.graphs import LONG_BUCKETS
from photon_grpc.runner.warm_up import warm_up_mixed
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
