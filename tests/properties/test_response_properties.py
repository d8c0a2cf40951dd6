"""Messages that are written by hand are those that protobuf would have made."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.generation import Start, Usage
from photon_grpc.core.logprobs import RECORD
from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.output.answer import Answer
from photon_grpc.frontend.output.logprobs import NO_TOKEN_LOGPROBS, TokenLogprobs
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish, Result, Update
from photon_grpc.server.wire import codec
from photon_grpc.server.wire import logprobs as scores
from photon_grpc.server.wire.responses import ResponseWriter
from photon_grpc.v1 import inference_pb2 as pb

START = Start("id", "demo", 7, 0.0)
#: Where the lengths of tokens, ids and ranks, and of the messages around them, change.
EDGES = (0, 1, 127, 128, 16383, 16384, 2**31 - 1)
NUMBERS = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**31 - 1))
LOGPROBS = st.one_of(st.floats(width=32), st.sampled_from((0.0, -0.0, -math.inf, math.nan)))
RECORDS = st.builds(RECORD.pack, NUMBERS, LOGPROBS, NUMBERS)


def spelled(token_id: int) -> bytes:
    return b"\xe3" * (20_000 if token_id == 16384 else token_id % 131)


@st.composite
def scored_tokens(draw: st.DrawFn, num_unscored: int = 0) -> TokenLogprobs:
    num_records = draw(st.integers(1, 4))
    positions = st.lists(RECORDS, min_size=num_records, max_size=num_records).map(b"".join)
    unscored = tuple([draw(NUMBERS) for _ in range(num_unscored)])
    return TokenLogprobs(b"".join(draw(st.lists(positions, max_size=3))), num_records, spelled, unscored)


MANY = TokenLogprobs(RECORD.pack(5, -1.0, 1) * (scores.MANY // 2 + 1), 1, spelled)


def messages_of(scored: TokenLogprobs) -> list[pb.TokenScore]:
    """Through protobuf's objects."""
    made = []
    for (token_id, logprob, rank), *others in scored.positions():
        score = pb.TokenScore(token_id=token_id, logprob=logprob, rank=rank, token_bytes=spelled(token_id))
        for other, value, place in others:
            score.candidates.add(token_id=other, logprob=value, rank=place, token_bytes=spelled(other))
        made.append(score)
    return made


def same(written: bytes | pb.StreamGenerateResponse, expected: pb.StreamGenerateResponse) -> bool:
    """Also where a logprob is no number, which equals none."""
    message = pb.StreamGenerateResponse.FromString(written) if isinstance(written, bytes) else written
    return message.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


def message_of(update: Update, sequence: int, start: Start | None) -> pb.StreamGenerateResponse:
    """By protobuf alone."""
    message = codec.stream_message(update, sequence, start)
    for output, delta in zip(message.deltas, update.deltas, strict=True):
        output.scores.extend(messages_of(delta.scores))
    if update.prompt_scores is not NO_TOKEN_LOGPROBS:
        message.start.prompt.scores.extend(messages_of(update.prompt_scores))
    return message


DELTAS = st.builds(
    OutputDelta,
    index=st.integers(0, 300),
    text=st.text(max_size=300),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
    scores=st.one_of(st.just(NO_TOKEN_LOGPROBS), scored_tokens()),
)
UPDATES = st.builds(Update, st.lists(DELTAS, max_size=4).map(tuple))


@given(UPDATES, st.integers(1, 2**62))
def test_what_is_written_by_hand_is_what_protobuf_makes(update: Update, sequence: int) -> None:
    writer = ResponseWriter()
    writer.sequence, writer.has_begun = sequence, True
    written = writer.plain(update)
    assert written is not None and same(written, message_of(update, sequence + 1, None))


@given(UPDATES, scored_tokens(num_unscored=1))
def test_a_first_message_and_a_whole_answer_have_the_same_scores(update: Update, prompt: TokenLogprobs) -> None:
    first = Update(update.deltas, prompt_scores=prompt)
    expected = message_of(first, 1, START)
    writer = ResponseWriter()
    assert writer.plain(first) is None
    assert same(asyncio.run(writer.full(first, START)), expected)
    whole = Result(START, first.deltas, prompt_scores=prompt)
    response = codec.generate_response(whole)
    asyncio.run(scores.add_to_response(response, whole))
    start = pb.GenerationStart.FromString(expected.start.SerializeToString())
    start.prompt.CopyFrom(response.prompt)
    assert same(pb.StreamGenerateResponse(deltas=response.outputs, start=start, sequence=1), expected)


@pytest.mark.parametrize(
    "update",
    [
        Update((OutputDelta(0, "x"),), Usage(1, 0, 1)),
        Update((OutputDelta(0, "x"), OutputDelta(1, "y", finish=OutputFinish(FinishReason.EOS, eos_token_id=2)))),
        Update((OutputDelta(0, "x", answer=Answer(reasoning="x")),)),
        # More ids than the event loop is kept for, in all.
        Update(
            (OutputDelta(0, scores=TokenLogprobs(RECORD.pack(5, -1.0, 1) * (scores.MANY // 2 + 1), 1, spelled)),) * 2
        ),
    ],
)
def test_what_holds_more_is_not_written_by_hand(update: Update) -> None:
    writer = ResponseWriter()
    assert writer.plain(Update((OutputDelta(0, "first"),))) is None
    asyncio.run(writer.full(Update((OutputDelta(0, "first"),)), START))
    assert writer.plain(update) is None
    assert same(asyncio.run(writer.full(update, START)), message_of(update, 2, None))
