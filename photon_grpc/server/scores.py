"""Scores into messages that are made but for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from photon_grpc.frontend.scores import ScoredTokens
from photon_grpc.frontend.update import OutputDelta
from photon_grpc.v1 import inference_pb2 as pb

#: Ids that are written beside the event loop: some 5 ms.
_MANY = 4096

Scores = RepeatedCompositeFieldContainer[pb.TokenScore]


async def add_scores(
    outputs: Iterable[pb.Output], deltas: tuple[OutputDelta, ...], prompt: pb.PromptInfo, prompt_scores: ScoredTokens
) -> None:
    """Those of `deltas` to their messages, in order; those of the prompt to `prompt`, which stays unset where there are
    none."""
    pairs = [(output.scores, delta.scores) for output, delta in zip(outputs, deltas, strict=True)]
    pairs.append((prompt.scores, prompt_scores))
    if sum([scores.num_ids for _, scores in pairs]) > _MANY:
        await asyncio.to_thread(_write_all, pairs)
    else:
        _write_all(pairs)


def _write_all(pairs: Iterable[tuple[Scores, ScoredTokens]]) -> None:
    for message, scores in pairs:
        _write(message, scores)


def _write(message: Scores, scores: ScoredTokens) -> None:
    token_bytes = scores.token_bytes
    for (token_id, logprob, rank), *others in scores.positions():
        score = message.add(token_id=token_id, logprob=logprob, rank=rank, token_bytes=token_bytes(token_id))
        candidates = score.candidates
        for other, value, place in others:
            candidates.add(token_id=other, logprob=value, rank=place, token_bytes=token_bytes(other))
