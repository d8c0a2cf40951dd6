"""On a CPU, with activations of 8 bits: drafts, company, chunks and continuations change no bit of an output."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from photon_grpc.config.flags import SchedulerConfig
from photon_grpc.config.quantization import FORMATS
from photon_grpc.core.logprobs import LogprobParams
from photon_grpc.core.request import SamplingParams
from photon_grpc.kernels.moe.route import RouterForm, reference
from tests.runner.models import model
from tests.runner.served import Served

PROMPTS = [[5, 9, 9, 200, 3] * 9, [*range(1, 60)]]
SAMPLINGS = [SamplingParams(0.0), SamplingParams(0.8, seed=3, frequency_penalty=0.4)]
ASKED = [(prompt, sampling) for sampling in SAMPLINGS for prompt in PROMPTS]
NUM_TOKENS = 12

#: The ids of an output and their log-probabilities.
Scored = tuple[list[int], bytes]


def served(form: str, family: str, **more: object) -> Served:
    return Served(model(family)[0], quantization=form, quantization_head="int8", **more)  # type: ignore[arg-type]


def outputs(of: Served, asked: list[tuple[list[int], SamplingParams]], continued: tuple[int, ...] = ()) -> list[Scored]:
    """Return the outputs of what is asked at once, without those of their ids that are given."""
    handles = [
        of.add(prompt, NUM_TOKENS, sampling, logprobs=LogprobParams(1), continued_ids=continued)
        for prompt, sampling in asked
    ]
    of.run()
    return [(of.outputs[handle].ids, of.outputs[handle].logprobs) for handle in handles]


@cache
def alone(form: str, family: str) -> list[Scored]:
    of = served(form, family)
    return [outputs(of, [each])[0] for each in ASKED]


EIGHT_BITS = [(name, "wide") for name, each in FORMATS.items() if each.activation_bits == 8]
#: Routed experts, latents, and windows in some layers.
FAMILIES = [("w8a8", family) for family in ("mixtral", "deepseek2", "gemma3")]


@pytest.mark.parametrize(("form", "family"), EIGHT_BITS + FAMILIES)
def test_drafts_chunks_and_company_change_no_bit(form: str, family: str) -> None:
    chunks = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24)
    drafting = served(form, family, speculation="ngram", num_drafts=7, scheduler=chunks)
    assert outputs(drafting, ASKED) == alone(form, family)


@pytest.mark.parametrize(("form", "family"), EIGHT_BITS)
def test_a_continuation_has_the_same_bits(form: str, family: str) -> None:
    of = served(form, family)
    for asked, (ids, logprobs) in zip(ASKED, alone(form, family), strict=True):
        ((further, scores),) = outputs(of, [asked], tuple(ids[:5]))
        assert further == ids[5:]
        assert scores and logprobs.endswith(scores)


def test_modules_that_are_left_in_16_bits_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = replace(FORMATS["w8a8"], ignored=("lm_head", "layers.1", "down_proj"))
    monkeypatch.setitem(FORMATS, "w8a8", left_out)
    drafting = served("w8a8", "llama", speculation="ngram", num_drafts=7)
    plain = served("w8a8", "llama")
    assert outputs(drafting, ASKED) == [outputs(plain, [each])[0] for each in ASKED]


@pytest.mark.parametrize("is_softmax", [True, False])
@pytest.mark.parametrize("num_experts", [5, 10, 64])
def test_a_token_has_the_same_experts_and_weights_in_any_company(num_experts: int, is_softmax: bool) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    x, weight = torch.randn(33, 48, generator=generator), torch.randn(num_experts, 48, generator=generator)
    form, bias = RouterForm(3, is_softmax=is_softmax), None if is_softmax else torch.zeros(num_experts)
    together = reference(x, weight, form, None, bias=bias)
    for token in range(len(x)):
        alone = reference(x[token : token + 1], weight, form, None, bias=bias)
        assert torch.equal(alone.experts[0], together.experts[token])
        assert torch.equal(alone.weights[0], together.weights[token])
