"""Log-probabilities over a fake engine: a message has those of its ids, the first one those of the whole prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from photon_grpc.core.ask import OutputAsk, SamplingAsk, StopAsk
from photon_grpc.core.generation import Candidate, TokenScore
from photon_grpc.core.logprobs import RECORD, LogprobParams
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import EngineRestarting, InvalidRequest
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.logprob_bounds import BYTES_PER_ID, BYTES_PER_OUTPUT
from photon_grpc.frontend.output.logprobs import OutputLogprobs
from photon_grpc.frontend.output.output import OutputText
from photon_grpc.frontend.output.update import Update
from photon_grpc.frontend.stream import TokenStream
from tests.frontend.fake_engine import FakeLink, ask, done, frontend, served
from tests.frontend.small_tokenizers import KINDS, definition

MODEL = served()
TOKENIZER = MODEL.tokenizer
assert TOKENIZER is not None
EOS = MODEL.eos_token_ids[0]
#: One beside the chosen, one given.
SCORES = OutputAsk(token_ids=True, logprobs=1, score_token_ids=(7,))


def ids(text: str) -> tuple[int, ...]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text, add_special_tokens=False)


def packed(*token_ids: int) -> bytes:
    """Pack three records for each id: the id itself, the next one, and 7."""
    return b"".join(
        RECORD.pack(id, -id / 8, id) + RECORD.pack(id + 1, -0.5, 1) + RECORD.pack(7, -9.0, 99) for id in token_ids
    )


def of(delta_scores: object) -> list[int]:
    """Return the scored ids, after a check that each has the records of `packed`."""
    scores = list(delta_scores)  # type: ignore[call-overload]
    assert TOKENIZER is not None
    for score in scores:
        above, requested = score.candidates
        assert (score.logprob, score.rank) == (-score.token_id / 8, score.token_id)
        assert (above.token_id, above.logprob, above.rank) == (score.token_id + 1, -0.5, 1)
        assert (requested.token_id, requested.logprob, requested.rank) == (7, -9.0, 99)
        assert score.token_bytes == TOKENIZER.token_bytes(score.token_id)
    return [score.token_id for score in scores]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Frontend, FakeLink]]:
    with frontend(MODEL) as (front, link):
        yield front, link


async def read(stream: TokenStream) -> Update:
    return await asyncio.wait_for(stream.__anext__(), 120)


async def test_requested_scores_reach_the_engine(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    for output, expected in (
        (OutputAsk(), LogprobParams()),
        (OutputAsk(logprobs=0), LogprobParams(0)),
        (OutputAsk(logprobs=20, prompt_logprobs=3), LogprobParams(20, 3)),
        (OutputAsk(score_token_ids=(4, 4, 2)), LogprobParams(token_ids=(4, 4, 2))),
    ):
        await front.stream(ask(output=output))
        assert link.adds[-1].request.logprobs == expected


async def test_a_message_has_the_scores_of_its_ids_also_where_text_is_held_back(
    pair: tuple[Frontend, FakeLink],
) -> None:
    front, link = pair
    stream = await front.stream(ask(output=SCORES, stop=StopAsk(stop_strings=("stop",))))
    smile = ids("\N{SLIGHTLY SMILING FACE}")
    assert len(smile) > 1
    link.step((1, smile[0]), scores={1: packed(smile[0])})
    first = (await read(stream)).deltas[0]
    assert first.text == "" and first.token_ids == smile[:1] and of(first.scores) == [*smile[:1]]
    for id in smile[1:]:
        link.step((1, id), scores={1: packed(id)})
    second = (await read(stream)).deltas[0]
    assert second.text and second.token_ids == smile[1:] and of(second.scores) == [*smile[1:]]


async def test_the_token_that_ends_an_output_is_scored(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(output=SCORES))
    a = ids("a")[0]
    link.step((1, a), (1, EOS), scores={1: packed(a, EOS)}, finished=(done(1, FinishReason.EOS, 2),))
    (delta,) = (await read(stream)).deltas
    assert delta.token_ids == (a, EOS) and of(delta.scores) == [a, EOS] and delta.finish is not None


async def test_scores_after_a_stop_string_are_dropped_with_their_ids(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(output=SCORES, stop=StopAsk(stop_strings=("b",))))
    a, b, c = ids("a")[0], ids("b")[0], ids("c")[0]
    link.step((1, c), scores={1: packed(c)})
    await read(stream)
    # Three ids of one step: drafts that were kept.
    link.step((1, a), (1, b), (1, c), scores={1: packed(a, b, c)})
    (delta,) = (await read(stream)).deltas
    assert (delta.text, delta.token_ids) == ("a", (a, b)) and of(delta.scores) == [a, b]


async def test_scores_come_without_ids_and_text(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(output=OutputAsk(text=False, logprobs=1, score_token_ids=(7,))))
    link.step((1, 20), scores={1: packed(20)})
    await read(stream)
    link.step((1, 21), scores={1: packed(21)})
    (delta,) = (await read(stream)).deltas
    assert (delta.text, delta.token_ids) == ("", ()) and of(delta.scores) == [21]


async def test_a_whole_result_has_one_score_a_token_of_each_output(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    task = asyncio.create_task(front.generate(ask(output=SCORES, sampling=SamplingAsk(num_outputs=2))))
    await link.added(1)
    link.step((1, 20), scores={1: packed(20)})
    await asyncio.sleep(0)
    link.step((1, 21), (2, 30), scores={1: packed(21), 2: packed(30)})
    link.step((2, 31), scores={2: packed(31)}, finished=(done(1, num_generated=2), done(2, num_generated=2)))
    result = await task
    assert [of(output.scores) for output in result.outputs] == [[20, 21], [30, 31]]
    assert len(result.prompt_scores) == 0


async def test_a_start_has_the_scores_of_the_whole_prompt(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask((9, 20, 21, 22), output=OutputAsk(prompt_logprobs=2)))
    link.step(prompt_scores={1: packed(20)})
    link.step(prompt_scores={1: packed(21)})
    link.step((1, 5), prompt_scores={1: packed(22)})
    update = await read(stream)
    first, *others = update.prompt_scores
    assert first == TokenScore(9, None, 0, MODEL.token_bytes(9)) and of(others) == [20, 21, 22]
    assert len(update.prompt_scores) == 4 and not update.deltas[0].scores
    link.step((1, 6))
    assert not (await read(stream)).prompt_scores


async def test_a_prompt_of_one_id_has_one_empty_score(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask((9,), output=OutputAsk(prompt_logprobs=0)))
    link.step((1, 5))
    assert list((await read(stream)).prompt_scores) == [TokenScore(9, None, 0, MODEL.token_bytes(9))]
    link.step((1, 6))
    assert not (await read(stream)).prompt_scores


async def test_a_prompt_that_was_not_scored_to_its_end_has_no_scores(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask((9, 20, 21), output=OutputAsk(prompt_logprobs=2)))
    link.step(prompt_scores={1: packed(20)}, finished=(done(1, FinishReason.TIME_LIMIT),))
    update = await read(stream)
    assert not update.prompt_scores and update.deltas[0].finish is not None


async def test_scores_of_an_engine_that_was_lost_are_not_sent(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(output=SCORES))
    link.step((1, 20), scores={1: packed(20)})
    link.lose()
    with pytest.raises(EngineRestarting):
        await read(stream)


def test_dropped_ids_are_dropped_with_their_scores() -> None:
    output = OutputText(0, detokenizer=None, wants_ids=True, scores=OutputLogprobs(1))
    output.scores.add(RECORD.pack(4, -0.5, 1))
    output.push(4)
    output.drop()
    assert not output.has_new_text()
    output.scores.add(RECORD.pack(5, -0.25, 1))
    output.push(5)
    assert list(output.take().scores) == [TokenScore(5, -0.25, 1)]


async def test_scores_for_a_closed_stream_are_ignored(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask((9, 20), output=OutputAsk(logprobs=1, prompt_logprobs=0)))
    stream.close()
    link.step((1, 20), scores={1: packed(20)}, prompt_scores={1: packed(20)})


async def test_without_a_tokenizer_tokens_have_no_bytes() -> None:
    with frontend(served(None)) as (front, link):
        stream = await front.stream(ask((9,), output=OutputAsk(logprobs=1)))
        link.step((1, 20), scores={1: RECORD.pack(20, -0.5, 1) + RECORD.pack(21, -0.75, 2)})
        (delta,) = (await read(stream)).deltas
    assert list(delta.scores) == [TokenScore(20, -0.5, 1, b"", (Candidate(21, -0.75, 2, b""),))]


# WordPiece spells what goes on in a word with ##.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"wordpiece"}))
def test_bytes_of_tokens_are_those_of_the_text(kind: str) -> None:
    tokenizer = Tokenizer(definition(kind))
    text = " na\u00efve caf\u00e9, \u65e5\u672c\u8a9e, \N{SLIGHTLY SMILING FACE}"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = b"".join(map(tokenizer.token_bytes, token_ids))
    assert spelled.decode().strip() == text.strip()
    assert max(len(tokenizer.token_bytes(id)) for id in range(600)) <= tokenizer.max_token_bytes
    assert tokenizer.token_bytes(10**6) == b""


# What fits a message. -------------------------------------------------------------------------------------------------

assert TOKENIZER is not None
BYTES_PER_SCORE = BYTES_PER_ID + TOKENIZER.max_token_bytes


def room(num_scores: int, num_outputs: int = 1) -> int:
    """Return the bytes of a message that has room for `num_scores` scored ids."""
    return BYTES_PER_OUTPUT * (1 + num_outputs) + num_scores * BYTES_PER_SCORE


async def max_tokens(max_message_bytes: int, prompt: tuple[int, ...] = (1, 2), **options: object) -> tuple[int, str]:
    """Return the max_tokens that the engine gets, and the finish reason of an output that reaches it."""
    with frontend(served(max_message_bytes=max_message_bytes)) as (front, link):
        await front.stream(ask(prompt, **options))
    stop = link.adds[0].request.stop
    return stop.max_tokens, stop.limit_reason.name


async def test_unset_max_tokens_becomes_what_a_message_holds_with_its_scores() -> None:
    five = OutputAsk(logprobs=5)
    # Six ids a token, and one for id and text.
    assert await max_tokens(room(7 * 10), output=five) == (10, "CONTEXT_LENGTH")
    assert await max_tokens(room(7 * 11 - 1), output=five) == (10, "CONTEXT_LENGTH")
    two = SamplingAsk(num_outputs=2)
    assert await max_tokens(room(7 * 10, 2), output=five, sampling=two) == (5, "CONTEXT_LENGTH")
    prompt = OutputAsk(logprobs=5, prompt_logprobs=1)
    assert await max_tokens(room(7 * 10 + 2 * 3), output=prompt) == (10, "CONTEXT_LENGTH")
    assert await max_tokens(room(7 * 10 + 2 * 3 - 1), output=prompt) == (9, "CONTEXT_LENGTH")
    # A continued output ends where the uninterrupted one does.
    assert await max_tokens(room(7 * 10), output=five, continue_from=(5, 6)) == (10, "CONTEXT_LENGTH")
    assert await max_tokens(room(7 * 10 + 2 * 3 - 1), output=prompt, continue_from=(5, 6)) == (9, "CONTEXT_LENGTH")
    assert await max_tokens(2**25, output=five) == (95, "CONTEXT_LENGTH")
    assert await max_tokens(4096, output=OutputAsk()) == (95, "CONTEXT_LENGTH")


@pytest.mark.parametrize(
    ("asked", "field", "num_scores"),
    [
        ({"output": OutputAsk(logprobs=5), "stop": StopAsk(max_tokens=11)}, "output.logprobs", 77),
        ({"output": OutputAsk(score_token_ids=(1,)), "stop": StopAsk(max_tokens=24)}, "output.score_token_ids", 72),
        ({"output": OutputAsk(logprobs=5), "stop": StopAsk(min_tokens=11)}, "output.logprobs", 77),
        ({"output": OutputAsk(prompt_logprobs=20), "input": None}, "output.prompt_logprobs", 22 * 5),
    ],
)
async def test_scores_that_fit_no_message_are_refused_with_both_numbers(
    asked: dict[str, object], field: str, num_scores: int
) -> None:
    prompt = (1, 2)
    if "input" in asked:
        prompt, asked = (1, 2, 3, 4, 5), {"output": asked["output"]}
    with pytest.raises(InvalidRequest) as caught:
        await max_tokens(room(70), prompt, **asked)
    error = caught.value
    assert (error.field, error.needed, error.limit) == (field, num_scores * BYTES_PER_SCORE, 70 * BYTES_PER_SCORE)
    assert str(error.needed) in error.message and str(error.limit) in error.message
