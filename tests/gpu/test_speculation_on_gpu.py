"""On a GPU: a draft model and prompt lookup beside graphs, in float32, change no output."""

from __future__ import annotations

from pathlib import Path

import pytest

from photon_grpc import demo
from photon_grpc.core.request import SamplingParams
from tests.runner.heads import random_head
from tests.runner.models import model
from tests.runner.served import Served

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 9, 200, 3], [17] * 8, [*range(1, 30)], [300]]
SAMPLINGS = (
    SamplingParams(0.0),
    SamplingParams(1.1, seed=3),
    SamplingParams(0.9, seed=4, top_k=40, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(0.0, logit_bias=((5, 4.0),), presence_penalty=1.0),
)


def outputs(served: Served, limits: tuple[int, ...] = (7, 7, 7, 7)) -> list[list[int]]:
    handles = [
        served.add(prompt, 40, sampling, max_drafts=most)
        for prompt, sampling, most in zip(PROMPTS, SAMPLINGS, limits, strict=True)
    ]
    served.run()
    return [served.outputs[handle].ids for handle in handles]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("eager", [False, True])
def test_drafts_change_nothing(drafter: str, eager: bool) -> None:
    directory, _ = model("llama")
    name = str(directory) if drafter == "model" else drafter
    plain = Served(directory, device="cuda", dtype="float32")
    drafting = Served(directory, device="cuda", dtype="float32", eager=eager, speculation=name, num_drafts=3)
    assert outputs(plain) == outputs(drafting)
    if drafter == "model":
        # It agrees with itself.
        assert drafting.engine.stats.steps < 0.5 * plain.engine.stats.steps
    # Rows with unequal numbers of drafts: passes of fewer and fewer rows.
    assert outputs(plain) == outputs(drafting, (1, 3, 0, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_head_changes_nothing(tmp_path: Path, dtype: str, eager: bool) -> None:
    random_head(tmp_path / "head")
    plain = Served(demo.TARGET, device="cuda", dtype=dtype)
    drafting = Served(demo.TARGET, device="cuda", dtype=dtype, eager=eager, speculation=str(tmp_path / "head"))
    assert outputs(plain) == outputs(drafting)
