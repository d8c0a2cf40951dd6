"""The whole step on a GPU: float32 equals transformers on the CPU, bfloat16 is near it, overlap changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from photon_grpc import demo
from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from photon_grpc.core.request import SamplingParams
from tests.runner.launched import step_of
from tests.runner.models import FAMILIES, FURTHER, WINDOWED, greedy, model
from tests.runner.served import Served
from tests.runner.test_greedy import NUM_GROUPS, prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", [*FAMILIES, WINDOWED, *FURTHER])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_greedy_output_in_float32_equals_transformers(family: str, block_size: int) -> None:
    directory, reference = model(family)
    asked = prompts(block_size)
    expected = [greedy(reference, prompt, 64) for prompt in asked]
    for depth, budget in ((0, 24), (1, 24), (1, 4096)):
        served = Served(
            directory,
            device="cuda",
            cache=CacheConfig(block_size=block_size, num_blocks=NUM_GROUPS[family] * 1024 // block_size),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, async_depth=depth),
        )
        assert served.complete(asked, 64) == expected


@pytest.mark.parametrize("family", ["qwen3", WINDOWED])
def test_eager_steps_and_replayed_ones_say_the_same(family: str) -> None:
    directory, _ = model(family)
    filtered = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, seed=2)
    for sampling in (SamplingParams(0.0), SamplingParams(temperature=1.1, seed=1), filtered):
        outputs = [
            Served(directory, device="cuda", eager=eager).complete(prompts(6), 30, sampling=sampling)
            for eager in (True, False)
        ]
        assert outputs[0] == outputs[1]


def test_preemption_under_overlap_changes_nothing() -> None:
    directory, reference = model("llama")
    asked = prompts(3)
    served = Served(
        directory,
        device="cuda",
        cache=CacheConfig(block_size=4, num_blocks=28),
        scheduler=SchedulerConfig(async_depth=1),
    )
    assert served.complete(asked, 40) == [greedy(reference, prompt, 40) for prompt in asked]
    assert served.engine.scheduler.num_preemptions > 0


def test_a_seed_draws_the_same_on_both_devices() -> None:
    directory, _ = model("qwen3")
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=5)
    on_cpu = Served(directory).complete(prompts(4), 20, sampling=sampling)
    on_gpu = Served(directory, device="cuda").complete(prompts(4), 20, sampling=sampling)
    assert on_gpu == on_cpu


@pytest.mark.parametrize("family", [*FAMILIES, WINDOWED, *FURTHER])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(family: str) -> None:
    directory, reference = model(family)
    prompt = prompts(9, (50,))[0]
    served = Served(directory, device="cuda", dtype="bfloat16", eager=True)
    logits: list[torch.Tensor] = []
    decoder = step_of(served.assembled.runner)._decoder
    sample = decoder.sample
    decoder.sample = lambda hidden, metadata: logits.append(decoder.logits(hidden)) or sample(hidden, metadata)
    served.complete([prompt], 1)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        expected = reference(ids).logits[0, -1]
        rounded = copy.deepcopy(reference).to("cuda", torch.bfloat16)(ids.cuda()).logits[0, -1].float().cpu()
    error, allowed = ((x - expected).norm() / expected.norm() for x in (logits[0][0].cpu(), rounded))
    assert error < 2 * allowed + 1e-3


PROMPTS = ("def fib(n):", "class Stack:\n", "import os\n", "for i in range(10):\n    ")


def embedded() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts as ids, and the embedded model's continuations on a CPU in float32."""
    tokenizer = Tokenizer.from_file(str(demo.TARGET / "tokenizer.json"))
    asked = [tokenizer.encode(text).ids for text in PROMPTS]
    reference = AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32).eval()
    return asked, [greedy(reference, prompt, 48) for prompt in asked]


def test_the_embedded_model_says_what_it_says_on_a_cpu() -> None:
    asked, expected = embedded()
    assert Served(demo.TARGET, device="cuda").complete(asked, 48) == expected
    assert [Served(demo.TARGET, device="cuda").complete([prompt], 48)[0] for prompt in asked] == expected


def test_fused_layers_in_bfloat16_say_nearly_the_same() -> None:
    asked, expected = embedded()
    served = Served(demo.TARGET, device="cuda", dtype="bfloat16")
    assert served.assembled.facts.kernels == "triton, fused"
    together = served.complete(asked, 48)
    # Rounding decides close calls; from there on the texts are two. Half of them agree to the end with room to spare.
    agreed = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), 48)
        for x, y in zip(together, expected, strict=True)
    ]
    assert sum(agreed) >= 24 * len(asked), agreed
