"""Streams over a fake engine: what is sent when, what ends an output, what is billed and recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from photon_grpc import __version__
from photon_grpc.core.ask import OutputAsk, SamplingAsk, StopAsk, StreamAsk, TextInput
from photon_grpc.core.frames import Failed, Started
from photon_grpc.core.generation import OutputUsage, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import (
    DeadlinePassed,
    Draining,
    EngineFailure,
    EngineRestarting,
    InternalFailure,
    InvalidRequest,
    ModelLoading,
    NumericFailure,
    PromptTooLong,
)
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.output.update import Update
from photon_grpc.frontend.readiness import State
from photon_grpc.frontend.stream import TokenStream
from tests.frontend.fake_engine import FACTS, FakeLink, ask, done, frontend, served

MODEL = served()
TOKENIZER = MODEL.tokenizer
assert TOKENIZER is not None
EOS = MODEL.eos_token_ids[0]


def ids(text: str) -> tuple[int, ...]:
    assert TOKENIZER is not None
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Frontend, FakeLink]]:
    with frontend(MODEL) as (front, link):
        yield front, link


async def ready(stream: TokenStream) -> Update | None:
    """Return what a reader gets now, None if it would have to wait."""
    task = asyncio.ensure_future(stream.__anext__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return None
    return task.result()


async def rest(stream: TokenStream) -> list[Update]:
    return [update async for update in stream]


def text_of(updates: list[Update], index: int = 0) -> str:
    return "".join(delta.text for update in updates for delta in update.deltas if delta.index == index)


async def test_the_first_token_comes_at_once_then_gathered_tokens_then_the_end(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask("Hello", output=OutputAsk(token_ids=True)))
    a, b, c = ids("a"), ids("b"), ids("c")
    assert await ready(stream) is None
    link.step((1, a[0]), started=(Started(1, 3, 0.5),))
    first = await ready(stream)
    assert first is not None
    assert (first.deltas[0].text, first.deltas[0].token_ids, first.usage, first.timing) == ("a", a, None, None)
    assert await ready(stream) is None
    link.step((1, b[0]))
    link.step((1, c[0]))
    second = await ready(stream)
    assert second is not None
    assert (second.deltas[0].text, second.deltas[0].token_ids) == ("bc", b + c)
    link.step((1, a[0]), finished=(done(1, FinishReason.MAX_TOKENS, 4, 3),))
    last = await ready(stream)
    assert last is not None and last.timing is not None and last.deltas[0].finish is not None
    assert last.deltas[0].text == "a"
    assert last.deltas[0].finish.reason is FinishReason.MAX_TOKENS
    assert last.usage == Usage(len(link.adds[0].request.prompt_ids), 3, 4)
    assert last.timing.queue_s == 0.5, "told with the first token"
    assert 0 <= last.timing.first_token_s <= last.timing.total_s
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()
    assert link.aborted == []
    assert front.num_streams == 0


async def test_a_waiting_reader_is_woken(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask())
    task = asyncio.ensure_future(stream.__anext__())
    await asyncio.sleep(0)
    link.step((1, ids("a")[0]))
    assert (await asyncio.wait_for(task, 120)).deltas[0].text == "a"


async def test_a_character_in_pieces_is_sent_whole_and_unfinished_ones_at_the_end(
    pair: tuple[Frontend, FakeLink],
) -> None:
    front, link = pair
    stream = await front.stream(ask(output=OutputAsk(token_ids=True)))
    pieces = ids("ﷺ")
    assert len(pieces) == 3
    for piece in pieces[:-1]:
        link.step((1, piece))
        update = await ready(stream)
        assert update is not None
        assert update.deltas[0].text == ""
        assert update.deltas[0].token_ids == (piece,)
    link.step((1, pieces[-1]))
    update = await ready(stream)
    assert update is not None
    assert update.deltas[0].text == "ﷺ"
    link.step((1, pieces[0]), finished=(done(1),))
    assert text_of(await rest(stream)) == "\N{REPLACEMENT CHARACTER}"


async def test_the_first_message_comes_even_without_text(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask())
    first, *others = ids("ﷺ")
    link.step((1, first))
    update = await ready(stream)
    assert update is not None
    assert [(delta.index, delta.text) for delta in update.deltas] == [(0, "")]
    link.step((1, others[0]))
    assert await ready(stream) is None


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_over_tokens_cuts_bills_and_aborts(pair: tuple[Frontend, FakeLink], include: bool) -> None:
    front, link = pair
    stream = await front.stream(
        ask(stop=StopAsk(stop_strings=("b c",), include_stop_in_text=include), output=OutputAsk(token_ids=True))
    )
    tokens = [*ids("a"), *ids("b"), *ids(" "), *ids("c"), *ids("d")]
    link.step(*((1, token) for token in tokens), started=(Started(1, 2, 0.5),))
    updates = await rest(stream)
    last = updates[-1]
    assert text_of(updates) == ("ab c" if include else "a")
    assert last.usage == Usage(len(link.adds[0].request.prompt_ids), 2, 4)
    assert last.timing is not None
    assert last.timing.queue_s == 0.5
    assert last.deltas[0].finish is not None
    assert (last.deltas[0].finish.reason, last.deltas[0].finish.stop_string) == (FinishReason.STOP_STRING, "b c")
    assert [id for update in updates for id in update.deltas[0].token_ids] == tokens[:4]
    assert link.aborted == [1]
    link.step((1, tokens[0]), finished=(done(1),))  # too late: nobody listens


async def test_a_stop_string_on_the_last_token_beats_max_tokens(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(stop=StopAsk(stop_strings=("b",), max_tokens=2)))
    link.step((1, ids("a")[0]), (1, ids("b")[0]), finished=(done(1, FinishReason.MAX_TOKENS),))
    updates = await rest(stream)
    finish = updates[-1].deltas[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.STOP_STRING
    assert text_of(updates) == "a"


async def test_held_text_is_flushed_when_the_output_ends_otherwise(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(stop=StopAsk(stop_strings=("abcd",))))
    link.step((1, ids("x")[0]))
    assert (await ready(stream)) is not None
    for char in "abc":
        link.step((1, ids(char)[0]))
    assert await ready(stream) is None
    link.step(finished=(done(1, FinishReason.TIME_LIMIT),))
    assert text_of(await rest(stream)) == "abc"


async def test_stop_strings_do_not_end_below_min_tokens(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(stop=StopAsk(stop_strings=("b",), min_tokens=3)))
    link.step(*((1, token) for token in (*ids("b"), *ids("b"), *ids("a"), *ids("b"), *ids("c"))))
    updates = await rest(stream)
    assert text_of(updates) == "bba"
    assert updates[-1].usage is not None
    assert updates[-1].usage.output_tokens == 4


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("reason", [FinishReason.EOS, FinishReason.STOP_TOKEN])
async def test_the_token_that_ends_is_billed_and_its_text_comes_on_request(
    pair: tuple[Frontend, FakeLink], skip: bool, include: bool, reason: FinishReason
) -> None:
    front, link = pair
    end = EOS if reason is FinishReason.EOS else ids("!")[0]
    stream = await front.stream(
        ask(
            stop=StopAsk(include_stop_in_text=include, stop_token_ids=() if reason is FinishReason.EOS else (end,)),
            output=OutputAsk(token_ids=True, skip_special_tokens=skip),
        )
    )
    link.step((1, ids("a")[0]), (1, end), finished=(done(1, reason),))
    updates = await rest(stream)
    spelled = "!" if reason is FinishReason.STOP_TOKEN else "" if skip else "<|eot_id|>"
    assert text_of(updates) == "a" + (spelled if include else "")
    assert updates[-1].deltas[0].token_ids == (*ids("a"), end)
    assert updates[-1].usage is not None
    assert updates[-1].usage.output_tokens == 2
    finish = updates[-1].deltas[0].finish
    assert finish is not None
    assert (finish.eos_token_id, finish.stop_token_id) == ((end, None) if reason is FinishReason.EOS else (None, end))


async def test_ignored_eos_is_an_ordinary_token(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(stop=StopAsk(ignore_eos=True), output=OutputAsk(skip_special_tokens=False)))
    link.step((1, EOS), (1, ids("a")[0]), finished=(done(1),))
    assert text_of(await rest(stream)) == "<|eot_id|>a"


async def test_without_text_only_ids_come(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(output=OutputAsk(text=False, token_ids=True), stop=StopAsk(stop_strings=("b",))))
    link.step((1, ids("a")[0]), (1, ids("b")[0]))
    updates = await rest(stream)
    assert text_of(updates) == ""
    assert updates[-1].deltas[0].token_ids == ids("a") + ids("b")
    assert updates[-1].deltas[0].finish is not None
    assert updates[-1].deltas[0].finish.stop_string == "b"


async def test_several_outputs_take_consecutive_handles_and_end_together(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    await front.stream(ask())
    stream = await front.stream(ask(sampling=SamplingAsk(num_outputs=3), stop=StopAsk(stop_strings=("z",))))
    assert link.adds[1].handle == 2
    link.step(
        *((handle, ids(char)[0]) for handle, char in ((2, "a"), (3, "b"), (4, "z"))),
        started=(Started(2, 1, 0.1), Started(3, 9, 0.1)),
    )
    update = await ready(stream)
    assert update is not None
    assert [(delta.index, delta.text) for delta in update.deltas] == [(0, "a"), (1, "b"), (2, "")]
    assert link.aborted == [4]
    link.step(finished=(done(3, num_cached=9),))
    update = await ready(stream)
    assert update is not None
    assert update.timing is None
    link.step((2, ids("c")[0]), finished=(done(2, num_cached=1),))
    updates = await rest(stream)
    assert updates[-1].usage == Usage(len(link.adds[1].request.prompt_ids), 1, 4)
    assert front.num_streams == 1


async def test_closing_aborts_what_still_runs_once(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(sampling=SamplingAsk(num_outputs=3)))
    link.step(finished=(done(2),))
    stream.close()
    stream.close()
    assert link.aborted == [1, 3]
    link.step((1, 5), (3, 5))
    with pytest.raises(StopAsyncIteration):
        await stream.__anext__()
    again = await front.stream(ask())
    assert link.adds[-1].handle == 4, "handles are never used again"
    again.close()


async def test_closing_wakes_a_reader(pair: tuple[Frontend, FakeLink]) -> None:
    front, _ = pair
    stream = await front.stream(ask())
    task = asyncio.ensure_future(rest(stream))
    await asyncio.sleep(0)
    stream.close()
    assert await asyncio.wait_for(task, 120) == []


async def test_max_tokens_per_message_gathers(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(stream=StreamAsk(max_tokens_per_message=3)))
    token = ids("a")[0]
    link.step((1, token))
    assert await ready(stream) is not None, "the first is never held"
    link.step((1, token))
    link.step((1, token))
    assert await ready(stream) is None
    link.step((1, token))
    update = await ready(stream)
    assert update is not None
    assert update.deltas[0].text == "aaa"
    link.step((1, token), finished=(done(1),))
    assert text_of(await rest(stream)) == "a", "nor is the last"


@pytest.mark.parametrize(
    "options", [{"max_tokens_per_message": 0}, {"heartbeat_interval_s": 0.5}, {"min_interval_s": -1.0}]
)
async def test_a_whole_answer_has_no_use_for_options_of_a_stream_but_checks_them(
    pair: tuple[Frontend, FakeLink], options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await pair[0].generate(ask("a", stream=StreamAsk(**options)))
    (name,) = options
    assert caught.value.field == f"stream.{name.removesuffix('_s')}"


async def test_min_interval_holds_and_releases_by_itself(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    token = ids("a")[0]
    slow = await front.stream(ask(stream=StreamAsk(min_interval_s=3600, max_tokens_per_message=4)))
    link.step((1, token))
    assert await ready(slow) is not None
    link.step(*[(1, token)] * 3)
    assert await ready(slow) is None
    link.step((1, token))
    assert await ready(slow) is not None, "so many tokens do not wait"
    link.step((1, token))
    assert await ready(slow) is None
    slow.close()
    quick = await front.stream(ask(stream=StreamAsk(min_interval_s=0.02)))
    link.step((2, token))
    await quick.__anext__()
    waiting = asyncio.ensure_future(quick.__anext__())
    await asyncio.sleep(0)
    link.step((2, token))
    link.step((2, token))
    assert text_of([await asyncio.wait_for(waiting, 120)]) == "aa"


async def test_continuous_usage_is_on_every_message(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask((7, 8), stream=StreamAsk(continuous_usage=True)))
    counts = []
    for n in range(3):
        link.step((1, ids("a")[0]), finished=(done(1),) if n == 2 else ())
        update = await ready(stream)
        assert update is not None
        counts.append(update.usage)
    assert counts == [Usage(2, 0, 1), Usage(2, 0, 2), Usage(2, 0, 3)]


async def test_grouping_into_frames_changes_nothing(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    tokens = ids("naïve 🙂 café ab abc ab") + ids("ﷺ")[:1]
    results = []
    for size in (1, 2, 5, 100):
        stream = await front.stream(ask(stop=StopAsk(stop_strings=("abd", "caff"))))
        handle = link.adds[-1].handle
        for start in range(0, len(tokens), size):
            link.step(*((handle, token) for token in tokens[start : start + size]))
        link.step(finished=(done(handle),))
        results.append(text_of(await rest(stream)))
    assert set(results) == {"naïve 🙂 café ab abc ab\N{REPLACEMENT CHARACTER}"}


async def test_failures_of_the_engine_reach_their_own_stream_only(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    bad = await front.stream(ask(sampling=SamplingAsk(num_outputs=2)))
    good = await front.stream(ask())
    link.step(
        (1, ids("a")[0]),
        (3, ids("b")[0]),
        failed=(Failed.of(2, DeadlinePassed("too late", field="f", needed=1, limit=2, retry_after_s=3.0)),),
    )
    assert text_of([await bad.__anext__()]) == "a", "what came before is still told"
    with pytest.raises(DeadlinePassed) as caught:
        await bad.__anext__()
    assert (caught.value.field, caught.value.needed, caught.value.limit, caught.value.retry_after_s) == ("f", 1, 2, 3.0)
    assert link.aborted == [1]
    link.step((1, 5), (3, ids("c")[0]), finished=(done(3),))
    assert text_of(await rest(good)) == "bc"


async def test_preemptions_of_all_outputs_are_counted(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(sampling=SamplingAsk(num_outputs=2)))
    link.step(preempted=(1, 1))
    link.step((1, 5), (2, 5), preempted=(2,), finished=(done(1), done(2)))
    last = (await rest(stream))[-1]
    assert last.timing is not None and last.timing.preemption_count == 3


async def test_one_output_that_fails_ends_its_request(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask(sampling=SamplingAsk(num_outputs=3)))
    link.step(failed=(Failed.of(2, NumericFailure("NaN")),))
    assert sorted(link.aborted) == [1, 3]
    link.step((1, 5), (3, 5))
    with pytest.raises(NumericFailure):
        await stream.__anext__()


async def test_a_defect_in_one_stream_leaves_the_others(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    bad, good = await front.stream(ask()), await front.stream(ask())
    bad.outputs[0]._detokenizer = None
    bad.outputs[0]._parts = None  # type: ignore[assignment]
    bad.outputs[0]._wants_ids = True
    bad.outputs[0]._ids = None  # type: ignore[assignment]
    link.step((1, 5), (2, ids("b")[0]), finished=(done(2),))
    assert text_of(await rest(good)) == "b"
    with pytest.raises(InternalFailure, match="detokenizing"):
        await bad.__anext__()
    assert link.aborted == [1]


async def test_a_defect_at_the_end_of_one_stream_leaves_the_others_and_no_text_in_the_log(
    pair: tuple[Frontend, FakeLink], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def finish(self) -> str:
            raise KeyError("".join(("sec", "ret")))

    front, link = pair
    bad, good = await front.stream(ask(request_id="r-1")), await front.stream(ask())
    monkeypatch.setattr(bad.outputs[0], "_detokenizer", Broken())
    link.step(finished=(done(1), done(2)))
    assert len(await rest(good)) == 1
    with pytest.raises(InternalFailure, match="detokenizing"):
        await bad.__anext__()
    assert "KeyError" in caplog.text and "r-1" in caplog.text and "secret" not in caplog.text


async def test_losing_the_engine_says_whether_output_had_begun(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    states: list[State] = []
    front.on_state(states.append)
    nothing, unread, begun, over = [await front.stream(ask()) for _ in range(4)]
    link.step((2, ids("a")[0]), (3, ids("a")[0]), (4, ids("a")[0]), finished=(done(4),))
    await begun.__anext__()
    waiting = asyncio.ensure_future(nothing.__anext__())
    await asyncio.sleep(0)
    link.lose()
    for stream, error in ((unread, EngineRestarting), (begun, EngineFailure)):
        with pytest.raises(error):
            await stream.__anext__()
    with pytest.raises(EngineRestarting):
        await asyncio.wait_for(waiting, 120)
    assert text_of(await rest(over)) == "a", "it had all that it needed"
    with pytest.raises(EngineRestarting):
        await front.stream(ask())
    link.facts = FACTS
    link.on_frame(FACTS)
    await front.stream(ask())
    assert states == [State.RESTARTING, State.SERVING]


async def test_loading_then_serving() -> None:
    link = FakeLink(None)
    with frontend(MODEL, link=link) as (front, _):
        assert front.state is State.LOADING
        assert front.model("").max_context_tokens == 256
        with pytest.raises(ModelLoading):
            await front.stream(ask())
        link.facts = FACTS
        link.on_frame(FACTS)
        assert front.state is State.SERVING
        assert front.model("alias").max_context_tokens == FACTS.max_model_len
        await front.stream(ask())


async def test_drain_lets_running_requests_finish(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask())
    draining = asyncio.ensure_future(front.drain(30))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await front.stream(ask())
    link.step((1, ids("a")[0]), finished=(done(1),))
    assert text_of(await rest(stream)) == "a"
    assert await asyncio.wait_for(draining, 120) == 0


@pytest.mark.parametrize("is_read", [False, True])
async def test_an_engine_that_ends_in_a_drain_was_stopped(pair: tuple[Frontend, FakeLink], is_read: bool) -> None:
    front, link = pair
    stream = await front.stream(ask())
    if is_read:
        link.step((1, ids("a")[0]))
        await ready(stream)
    draining = asyncio.ensure_future(front.drain(30))
    await asyncio.sleep(0)
    link.lose()
    with pytest.raises(Draining, match="the server was stopped"):
        await rest(stream)
    stream.close()
    await asyncio.wait_for(draining, 120)


async def test_drain_fails_unfinished_streams(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    left = await front.stream(ask())
    waiting = asyncio.ensure_future(front.generate(ask()))
    await link.added(2)
    assert await front.drain(0.01) == 2
    for attempt in (left.__anext__(), waiting):
        with pytest.raises(Draining):
            await attempt
    assert sorted(link.aborted) == [1, 2]


async def generated(front: Frontend, link: FakeLink, **changes: object) -> asyncio.Task[object]:
    task = asyncio.ensure_future(front.generate(ask(**changes)))  # type: ignore[arg-type]
    await link.added(1)
    return task


async def test_generate_returns_the_whole_result(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    changes = {
        "sampling": SamplingAsk(num_outputs=2, seed=3),
        "output": OutputAsk(token_ids=True),
        "stream": StreamAsk(min_interval_s=9),
    }
    task = await generated(front, link, **changes)
    for char in "abc":
        link.step((1, ids(char)[0]), (2, ids(char.upper())[0]))
        await asyncio.sleep(0)
    link.step(finished=(done(1), done(2, FinishReason.TIME_LIMIT)))
    result = await asyncio.wait_for(task, 120)
    assert [output.text for output in result.outputs] == ["abc", "ABC"]  # type: ignore[attr-defined]
    assert [output.token_ids for output in result.outputs] == [
        ids("a") + ids("b") + ids("c"),
        ids("A") + ids("B") + ids("C"),
    ]  # type: ignore[attr-defined]
    assert [output.finish.reason for output in result.outputs] == [FinishReason.MAX_TOKENS, FinishReason.TIME_LIMIT]  # type: ignore[attr-defined]
    assert result.usage.output_tokens == 6  # type: ignore[attr-defined]
    assert result.start.seed == 3  # type: ignore[attr-defined]


async def test_generate_cancelled_aborts_and_lost_can_be_retried(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    task = await generated(front, link)
    link.step((1, ids("a")[0]))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert link.aborted == [1]
    other = asyncio.ensure_future(front.generate(ask()))
    await link.added(2)
    link.step((2, ids("a")[0]))
    await asyncio.sleep(0.01)
    link.lose()
    with pytest.raises(EngineRestarting):
        await other


async def test_a_request_whose_engine_goes_while_it_is_encoded_is_refused(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    task = asyncio.ensure_future(front.stream(ask()))
    await asyncio.sleep(0)
    link.lose()
    with pytest.raises(EngineRestarting):
        await task
    assert front.num_streams == 0


async def test_giving_up_is_final(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask())
    whole = asyncio.ensure_future(front.generate(ask()))
    await link.added(2)
    front.give_up("it is broken")
    for failing in (stream.__anext__(), whole, front.stream(ask())):
        with pytest.raises(EngineFailure, match="it is broken"):
            await failing
    assert front.state is State.FAILED


async def test_tokenize_is_what_generate_sees_and_detokenize_its_text(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    text = "def fib(n): 🙂"
    tokens = await front.tokenize("", TextInput(text))
    await front.stream(ask(text))
    assert link.adds[0].request.prompt_ids == tokens
    assert await front.detokenize("alias", tokens, True) == text
    assert await front.detokenize("", tokens, False) == "<|begin_of_text|>" + text
    assert await front.detokenize("", (), True) == ""
    for wrong in ((512,), (-1,)):
        with pytest.raises(InvalidRequest) as caught:
            await front.detokenize("", wrong, True)
        assert caught.value.field == "token_ids.ids[0]"
    with pytest.raises(InvalidRequest):
        await front.tokenize("", TextInput(""))


async def test_tokenize_names_its_own_limit(pair: tuple[Frontend, FakeLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenize returns more ids than the context holds, and reports its own limit if they exceed that, too."""
    monkeypatch.setattr("photon_grpc.frontend.frontend._MAX_TOKENIZED", 1000)
    front, _ = pair
    assert len(await front.tokenize("", TextInput("?!" * 450))) > front.model("").max_context_tokens
    for num_chars in (1100, 10**6):  # what is encoded first, and what cannot fit
        with pytest.raises(PromptTooLong, match="Tokenize returns at most 1000") as caught:
            await front.tokenize("", TextInput("?!" * num_chars))
        assert caught.value.limit == 1000 < (caught.value.needed or 0)
        assert str(caught.value.needed) in str(caught.value)


async def test_long_texts_do_not_stop_the_loop() -> None:
    with frontend(MODEL, link=FakeLink(None)) as (front, _):
        task = asyncio.ensure_future(front.tokenize("", TextInput("ab " * 1_000)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 1
        assert len(await task) > 256


async def test_a_slow_reader_gets_one_merged_message(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask())
    for _ in range(500):
        link.step((1, ids("a")[0]))
    update = await ready(stream)
    assert update is not None
    assert update.deltas[0].text == "a" * 500
    assert await ready(stream) is None


async def test_a_continued_output_sends_and_bills_only_new_ids(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    stream = await front.stream(ask((1, 2, 3), continue_from=ids("ab"), output=OutputAsk(token_ids=True)))
    assert link.adds[0].request.continued_ids == ids("ab")
    link.step((1, ids("c")[0]), finished=(done(1, FinishReason.MAX_TOKENS, 1),))
    (last,) = await rest(stream)
    assert (last.deltas[0].text, last.deltas[0].token_ids) == ("c", ids("c"))
    assert last.usage == Usage(5, 0, 1)


async def test_ids_after_the_end_of_an_output_do_not_continue_it(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    with pytest.raises(InvalidRequest) as caught:
        await front.stream(ask(continue_from=ids("abc"), stop=StopAsk(stop_strings=("b",))))
    assert caught.value.field == "continue_from.ids[2]"
    stream = await front.stream(ask(continue_from=ids("ab"), stop=StopAsk(stop_strings=("b",))))
    (only,) = await rest(stream)
    assert only.deltas[0].finish is not None and only.deltas[0].finish.reason is FinishReason.STOP_STRING
    assert only.deltas[0].text == "" and link.adds == [] and front.num_streams == 0


async def test_the_usage_of_each_output_comes_with_its_finish(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    changes = {"sampling": SamplingAsk(num_outputs=3), "stop": StopAsk(stop_strings=("stop",))}
    stream = await front.stream(ask(**changes))
    whole = await generated(front, link, **changes)
    await link.added(2)
    pieces = ids("stop")
    for first in (1, 4):
        for number, piece in enumerate(pieces):
            link.step((first, piece), (first + 1, ids("a")[0]), (first + 2, ids("b")[0]))
            if not number:
                link.step(finished=(done(first + 2, FinishReason.ABORTED),))
        link.step(finished=(done(first + 1, FinishReason.TIME_LIMIT),))
    updates = await rest(stream)
    deltas = [delta for update in updates for delta in update.deltas]
    assert all((delta.usage is None) == (delta.finish is None) for delta in deltas)
    counts = {delta.index: delta.usage.output_tokens for delta in deltas if delta.usage is not None}
    assert counts == {0: len(pieces), 1: len(pieces), 2: 1}
    assert updates[-1].usage is not None and updates[-1].usage.output_tokens == sum(counts.values())
    result = await asyncio.wait_for(whole, 120)
    assert {output.index: output.usage.output_tokens for output in result.outputs} == counts  # type: ignore[attr-defined]


async def test_a_continued_output_counts_what_this_call_delivers(pair: tuple[Frontend, FakeLink]) -> None:
    front, link = pair
    a, b = ids("a")[0], ids("b")[0]
    stream = await front.stream(ask(continue_from=(a, a, a)))
    link.step((1, b), finished=(done(1),))
    (last,) = await rest(stream)
    assert last.deltas[0].usage == OutputUsage(1)
    assert last.usage is not None and last.usage.output_tokens == 1
    ended = await front.stream(ask(continue_from=(a, b), stop=StopAsk(stop_strings=("b",))))
    (only,) = await rest(ended)
    assert only.deltas[0].usage == OutputUsage(0), "it ended before this call"


async def test_a_request_is_created_when_it_arrives(pair: tuple[Frontend, FakeLink]) -> None:
    front, _ = pair
    stream = await front.stream(ask(create_time_s=1_700_000_000.5))
    assert stream.start.create_time_s == 1_700_000_000.5
    assert stream.start.release == __version__
    stream.close()
