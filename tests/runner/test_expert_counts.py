"""The experts that steps reach are told by outputs, loads and the step trace."""

from __future__ import annotations

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from tests.runner.models import model
from tests.runner.served import Served

TOP_K = 2


def test_a_load_tells_the_experts_that_steps_reached() -> None:
    directory, _ = model("qwen3moe")
    served = Served(directory, cache=CacheConfig(num_blocks=64), scheduler=SchedulerConfig(max_num_seqs=4))
    before = served.engine.stats.load(served.engine.scheduler)
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    served.complete(prompts, 4)
    load = served.engine.stats.load(served.engine.scheduler)
    steps = load.steps - before.steps
    # Of three layers one has no experts; the last id of an output is not computed.
    tokens = sum(len(prompt) + 3 for prompt in prompts)
    assert load.expert_layers - before.expert_layers == 2 * steps
    assert load.expert_tokens - before.expert_tokens == 2 * TOP_K * tokens
    reached, busiest = load.experts_reached - before.experts_reached, load.busiest_expert_tokens
    assert 2 * TOP_K * steps <= reached <= 2 * 8 * steps
    assert 0 < busiest - before.busiest_expert_tokens <= 2 * tokens


def test_a_model_without_experts_tells_of_none() -> None:
    directory, _ = model("llama")
    served = Served(directory)
    served.complete([[5, 6, 7]], 2)
    load = served.engine.stats.load(served.engine.scheduler)
    assert (load.steps > 0, load.expert_layers, load.expert_tokens) == (True, 0, 0)
