"""Outputs sampled greedily from transformers' logits under penalties, biases and allowed ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from photon_grpc.core.request import SamplingParams
from tests.runner.models import model

PROMPTS = [[5, 9, 9, 200, 3], [17] * 8, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [300]]
BIAS = ((3, 2.5), (17, -100.0), (40, 1.0), (319, 0.5))


def shaped(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **more)


WAYS: dict[str, SamplingParams] = {
    "repetition": shaped(repetition_penalty=1.4),
    "repetition below 1": shaped(repetition_penalty=0.7),
    "presence": shaped(presence_penalty=1.5),
    "frequency": shaped(frequency_penalty=0.8),
    "negative": shaped(frequency_penalty=-0.3, presence_penalty=-2.0),
    "bias": shaped(logit_bias=BIAS),
    "allowed": shaped(allowed_token_ids=(3, 31, 32, 40, 100, 319)),
    "all": shaped(
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=BIAS,
        allowed_token_ids=tuple(range(0, 320, 3)),
    ),
}


@dataclass
class Expected:
    """One output, sampled greedily from transformers' logits."""

    reference: Any
    sampling: SamplingParams
    ids: list[int]
    num_prompt: int
    sampled: list[int] = field(default_factory=list)

    def logits(self) -> torch.Tensor:
        s, ids = self.sampling, torch.tensor([self.ids])
        x = self.reference(ids).logits[:, -1].float()
        processors = LogitsProcessorList()
        if s.logit_bias:
            processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in s.logit_bias]))
        if s.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
        (x,) = processors(ids, x)
        for token, count in Counter(self.ids[self.num_prompt :]).items():
            x[token] -= s.frequency_penalty * count + s.presence_penalty
        if s.allowed_token_ids:
            outside = torch.ones_like(x, dtype=torch.bool)
            outside[list(s.allowed_token_ids)] = False
            x[outside] = -torch.inf
        return x

    def sample(self, num_tokens: int) -> list[int]:
        for _ in range(num_tokens):
            self.ids.append(int(self.logits().argmax()))
        return self.ids[self.num_prompt :]


def expected(prompt: list[int], sampling: SamplingParams, num_tokens: int) -> list[int]:
    return list(_expected(tuple(prompt), sampling, max(num_tokens, 16))[:num_tokens])


@cache
@torch.inference_mode()
def _expected(prompt: tuple[int, ...], sampling: SamplingParams, num_tokens: int) -> list[int]:
    return Expected(model("llama")[1], sampling, list(prompt), len(prompt)).sample(num_tokens)
