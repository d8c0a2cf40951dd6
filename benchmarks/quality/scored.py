"""What a model computes through the whole engine: logits of every position of given texts, and greedy outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch

from photon_grpc import LLM
from photon_grpc.models.decoder import Decoder


def logits_of(llm: LLM, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [len(ids) - 1, V] from which `prompt_logprobs` of the ids are computed."""
    with _kept_logits() as parts:
        (completion,) = llm.generate([list(ids)], prompt_logprobs=1, max_tokens=1, temperature=0.0)
    # The position after the prompt is computed last; it is sampled.
    logits = torch.cat(parts)[: len(ids) - 1]
    _check(logits, ids, [score.logprob or 0.0 for score in completion.prompt_scores[1:]])
    return logits


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[tuple[int, ...]]:
    """Return exactly `num_tokens` ids after each prompt, all prompts at once."""
    asked = [list(prompt) for prompt in prompts]
    found = llm.generate(asked, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [completion.token_ids for completion in found]


@contextmanager
def _kept_logits() -> Iterator[list[torch.Tensor]]:
    """Keep what the decoder returns as logits, in the order of the positions."""
    parts: list[torch.Tensor] = []
    compute = Decoder.logits

    def keep(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(decoder, hidden)
        parts.append(logits.detach().to("cpu", copy=True))
        return logits

    with patch.object(Decoder, "logits", keep):
        yield parts


def _check(logits: torch.Tensor, ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Raise RuntimeError if these are not the logits of the log-probabilities that the request got."""
    if logits.shape[0] != len(ids) - 1:
        raise RuntimeError(f"logits of {logits.shape[0]} positions were computed for {len(ids)} ids")
    own = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    difference = float((own - torch.tensor(logprobs)).abs().max())
    if difference > 1e-3:
        raise RuntimeError(f"the kept logits are not those of the request: log-probabilities differ by {difference}")
