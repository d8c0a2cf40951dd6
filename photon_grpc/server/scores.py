"""Scores into messages that are made but for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

from photon_grpc.frontend.scores import NOT_SCORED, ScoredTokens
from photon_grpc.frontend.update import OutputDelta, Result, Update
from photon_grpc.v1 import inference_pb2 as pb

#: Ids that are written beside the event loop: some 5 ms.
_MANY = 4096

Scores = RepeatedCompositeFieldContainer[pb.TokenScore]


async def add_to_message(message: pb.StreamGenerateResponse, update: Update) -> None:
    """The scores of `update` to its message."""
    pairs = _pairs(message.deltas, update.deltas)
    if update.prompt_scores is not NOT_SCORED:
        pairs.append((message.start.prompt.scores, update.prompt_scores))
    await _write_all(pairs)


async def add_to_response(response: pb.GenerateResponse, result: Result) -> None:
    """The scores of `result` to its answer."""
    pairs = _pairs(response.outputs, result.outputs)
    if result.prompt_scores is not NOT_SCORED:
        pairs.append((response.prompt.scores, result.prompt_scores))
    await _write_all(pairs)


def _pairs(outputs: Iterable[pb.Output], deltas: tuple[OutputDelta, ...]) -> list[tuple[Scores, ScoredTokens]]:
    return [(output.scores, delta.scores) for output, delta in zip(outputs, deltas, strict=True)]


async def _write_all(pairs: list[tuple[Scores, ScoredTokens]]) -> None:
    is_large = sum([scores.num_ids for _, scores in pairs]) > _MANY
    for message, scores in pairs:
        if is_large:
            await asyncio.to_thread(_write, message, scores)
        else:
            _write(message, scores)


def _write(message: Scores, scores: ScoredTokens) -> None:
    token_bytes = scores.token_bytes
    for (token_id, logprob, rank), *others in scores.positions():
        score = message.add(token_id=token_id, logprob=logprob, rank=rank, token_bytes=token_bytes(token_id))
        candidates = score.candidates
        for other, value, place in others:
            candidates.add(token_id=other, logprob=value, rank=place, token_bytes=token_bytes(other))
