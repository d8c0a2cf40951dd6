"""Errors of wrong asks, with the field that they name, and the values of unset options."""

from __future__ import annotations

import math
import time

import pytest
from msgspec.structs import replace

from photon_grpc.core.ask import (
    Ask,
    CacheAsk,
    ChatInput,
    ChatMessage,
    OutputAsk,
    SamplingAsk,
    SchedulingAsk,
    StopAsk,
    StreamAsk,
    TextInput,
)
from photon_grpc.core.fields import NEUTRAL as NEUTRAL_VALUES
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import (
    DeadlinePassed,
    FeatureNotSupported,
    InvalidRequest,
    KVCapacity,
    ModelLoading,
    ModelNotFound,
    PhotonError,
    PromptTooLong,
)
from tests.frontend.fake_engine import FACTS, FEATURES, NEUTRAL, FakeLink, ask, frontend, served

NAN, INF = math.nan, math.inf
INVALID = [
    *[
        (ask(sampling=SamplingAsk(temperature=value)), "sampling.temperature")
        for value in (-0.1, NAN, INF, -INF, -1e38)
    ],
    *[(ask(sampling=SamplingAsk(top_p=value)), "sampling.top_p") for value in (0.0, -0.5, 1.01, NAN, INF)],
    *[(ask(sampling=SamplingAsk(top_k=value)), "sampling.top_k") for value in (0, -2, 2**31, -(2**31))],
    *[(ask(sampling=SamplingAsk(min_p=value)), "sampling.min_p") for value in (-0.1, 1.1, NAN)],
    *[(ask(sampling=SamplingAsk(num_outputs=value)), "sampling.num_outputs") for value in (0, 9, 2**32 - 1)],
    *[(ask(sampling=SamplingAsk(seed=value)), "sampling.seed") for value in (-1, 2**64)],
    *[
        (ask(sampling=SamplingAsk(**{f"{name}_penalty": value})), f"sampling.{name}_penalty")
        for name, values in {"repetition": (0.0, -1.0, 1e4), "presence": (2.1, -2.1), "frequency": (2.1, -2.1)}.items()
        for value in (*values, NAN, INF)
    ],
    (ask(sampling=SamplingAsk(logit_bias=((3, 100.5),))), "sampling.logit_bias[3]"),
    (ask(sampling=SamplingAsk(logit_bias=((3, NAN),))), "sampling.logit_bias[3]"),
    (ask(sampling=SamplingAsk(logit_bias=((2**31, 1.0),))), "sampling.logit_bias[2147483648]"),
    (ask(sampling=SamplingAsk(allowed_token_ids=())), "sampling.allowed_token_ids"),
    (ask(sampling=SamplingAsk(allowed_token_ids=(1, 2**31))), "sampling.allowed_token_ids.ids[1]"),
    (ask(stop=StopAsk(max_tokens=0)), "stop.max_tokens"),
    (ask(stop=StopAsk(max_tokens=4, min_tokens=5)), "stop.min_tokens"),
    (ask(stop=StopAsk(min_tokens=2**32 - 1)), "stop.min_tokens"),
    (ask(stop=StopAsk(stop_strings=("a", ""))), "stop.stop_strings[1]"),
    (ask(stop=StopAsk(stop_strings=("é" * 513,))), "stop.stop_strings[0]"),
    (ask(stop=StopAsk(stop_strings=tuple(map(str, range(65))))), "stop.stop_strings"),
    (ask(stop=StopAsk(stop_token_ids=(1, 512))), "stop.stop_token_ids[1]"),
    (ask(stop=StopAsk(min_tokens=1, stop_token_ids=tuple(range(512)))), "stop.stop_token_ids"),
    *[(ask(stop=StopAsk(max_duration_s=value)), "stop.max_duration") for value in (-1.0, NAN)],
    (ask(scheduling=SchedulingAsk(max_queue_duration_s=-1.0)), "scheduling.max_queue_duration"),
    (ask(scheduling=SchedulingAsk(timeout_s=-0.5)), "scheduling.timeout"),
    (ask(scheduling=SchedulingAsk(speculation=8)), "scheduling.speculation"),
    *[(ask(scheduling=SchedulingAsk(priority=value)), "scheduling.priority") for value in (2**31, -(2**31) - 1)],
    *[(ask(output=OutputAsk(logprobs=value)), "output.logprobs") for value in (-1, 21, 2**32 - 1)],
    *[(ask(output=OutputAsk(prompt_logprobs=value)), "output.prompt_logprobs") for value in (-1, 21)],
    *[
        (ask(output=OutputAsk(score_token_ids=value)), f"output.score_token_ids.ids{place}")
        for value, place in (((), ""), (tuple(range(21)), ""), ((1, 512), "[1]"), ((-1,), "[0]"))
    ],
    (ask(stream=StreamAsk(min_interval_s=-1)), "stream.min_interval"),
    (ask(stream=StreamAsk(max_tokens_per_message=0)), "stream.max_tokens_per_message"),
    *[(ask(stream=StreamAsk(heartbeat_interval_s=value)), "stream.heartbeat_interval") for value in (0.0, 0.999, NAN)],
    *[(ask(request_id=value), "request_id") for value in ("x" * 129, "naïve", "a\nb", "\x7f")],
    (ask(""), "text"),
    (ask(()), "token_ids.ids"),
    (ask((1, 512)), "token_ids.ids[1]"),
    (ask((2**32 - 1,)), "token_ids.ids[0]"),
    (ask(input=None), "input"),
    (ask(input=ChatInput(())), "chat.messages"),
]


def come_now(asked: Ask) -> Ask:
    return replace(asked, origin=replace(asked.origin, arrival_s=time.monotonic()))


@pytest.mark.parametrize(("wrong", "field"), INVALID, ids=lambda value: value if isinstance(value, str) else "")
async def test_an_invalid_field_is_named_and_never_reaches_the_engine(wrong: Ask, field: str) -> None:
    with frontend(served(template="{{ messages[0].content }}")) as (front, link):
        with pytest.raises(InvalidRequest) as caught:
            await front.stream(come_now(wrong))
        assert type(caught.value) is InvalidRequest
        assert caught.value.field == field
        assert link.sent == []


@pytest.mark.parametrize(
    "fine",
    [
        ask(sampling=SamplingAsk(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=2**64 - 1, num_outputs=8)),
        ask(sampling=SamplingAsk(temperature=1e38, top_p=1e-9, top_k=2**31 - 1, min_p=1.0, seed=0)),
        ask(
            stop=StopAsk(
                max_tokens=1, min_tokens=1, stop_strings=("é" * 512,), stop_token_ids=(0, 511), max_duration_s=0
            )
        ),
        ask(scheduling=SchedulingAsk(priority=-(2**31), max_queue_duration_s=0)),
        ask(request_id="~ printable! " + "x" * 115),
        ask((511,)),
    ],
)
async def test_values_at_the_bounds_are_accepted(fine: Ask) -> None:
    with frontend() as (front, link):
        await front.stream(come_now(fine))
        assert len(link.adds) == 1


@pytest.mark.parametrize(
    ("wrong", "error", "field"),
    [
        (ask(model="nobody"), ModelNotFound, "model"),
        (ask("x " * 200), PromptTooLong, "text"),
        (ask("x" * 4_000_000), PromptTooLong, "text"),
        (ask((1,) * 128), PromptTooLong, "token_ids.ids"),
        (ask((1,) * 1_000_000), PromptTooLong, "token_ids.ids"),
        (ask((1,) * 10, stop=StopAsk(max_tokens=119)), PromptTooLong, "stop.max_tokens"),
        (ask((1,) * 10, stop=StopAsk(max_tokens=2**32 - 1)), PromptTooLong, "stop.max_tokens"),
        (ask((1,) * 90, stop=StopAsk(max_tokens=8)), KVCapacity, "stop.max_tokens"),
        (ask((1,) * 97), KVCapacity, "token_ids.ids"),
        (ask(deadline_s=0.0), DeadlinePassed, ""),
        (ask(scheduling=SchedulingAsk(timeout_s=0.0)), DeadlinePassed, ""),
        (ask(input=ChatInput((ChatMessage("user", "x"),))), FeatureNotSupported, "chat"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_requests_that_cannot_be_served_are_refused(wrong: Ask, error: type[PhotonError], field: str) -> None:
    with frontend() as (front, link):
        with pytest.raises(error) as caught:
            await front.stream(come_now(wrong))
        assert caught.value.field == field
        assert link.sent == []
        if error in (PromptTooLong, KVCapacity):
            assert caught.value.needed is not None
            assert caught.value.limit == (FACTS.max_model_len if error is PromptTooLong else FACTS.num_blocks)
            assert caught.value.needed > caught.value.limit


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (ask(request_id="x" * 129, deadline_s=0.0), InvalidRequest),
        (ask((512,), deadline_s=0.0), InvalidRequest),
        (ask((1,) * 128, deadline_s=0.0), PromptTooLong),
        (ask(stop=StopAsk(stop_token_ids=(512,)), deadline_s=0.0), InvalidRequest),
        (ask(sampling=SamplingAsk(top_k=0), scheduling=SchedulingAsk(timeout_s=0.0)), InvalidRequest),
    ],
)
async def test_invalid_value_is_reported_although_the_deadline_has_passed(wrong: Ask, error: type[PhotonError]) -> None:
    """A client retries after a passed deadline, in vain if the request is invalid."""
    with frontend() as (front, _), pytest.raises(InvalidRequest) as caught:
        await front.stream(come_now(wrong))
    assert type(caught.value) is error


@pytest.mark.parametrize("names", [("small", "alias"), ("small", *("alias" * 9 for _ in range(99)))])
def test_the_error_of_an_unknown_model_names_the_known_ones(names: tuple[str, ...]) -> None:
    with frontend(served(names=names)) as (front, _), pytest.raises(ModelNotFound) as caught:
        front.model("gpt-4" * 999)
    assert "'gpt-4" in caught.value.message
    assert "small, alias" in caught.value.message
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("num_prompt", "asked", "expected"),
    [(90, 7, 7), (96, 1, 1), (10, None, 6 * 16 + 1 - 10), (96, None, 1), (1, None, 96)],
)
async def test_max_tokens_is_what_context_and_blocks_hold(num_prompt: int, asked: int | None, expected: int) -> None:
    """The last token is sampled but never stored: 6 blocks of 16 hold prompt + output - 1."""
    with frontend() as (front, link):
        await front.stream(ask((1,) * num_prompt, stop=StopAsk(max_tokens=asked)))
        stop = link.adds[0].request.stop
        assert stop.max_tokens == expected
        assert stop.limit_reason is (FinishReason.MAX_TOKENS if asked else FinishReason.CONTEXT_LENGTH)


async def test_max_tokens_is_the_rest_of_the_context_where_blocks_are_plenty() -> None:
    with frontend(link=FakeLink(replace_facts(num_blocks=1000))) as (front, link):
        await front.stream(ask((1,) * 28))
        assert link.adds[0].request.stop.max_tokens == 100


async def test_unset_sampling_comes_from_the_model_then_is_neutral() -> None:
    with frontend(served(defaults=NEUTRAL_VALUES | {"temperature": 0.6, "top_k": 20})) as (front, link):
        await front.stream(ask())
        await front.stream(ask(sampling=SamplingAsk(temperature=0.0, top_k=-1, top_p=0.5, min_p=0.1, seed=7)))
        first, second = (add.request.sampling for add in link.adds)
        assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.6, 1.0, 20, 0.0)
        assert (second.temperature, second.top_p, second.top_k, second.min_p, second.seed) == (0.0, 0.5, -1, 0.1, 7)
        assert front.model("").default_sampling == replace(NEUTRAL, temperature=0.6, top_k=20)


async def test_seeds_are_random_reported_and_repeatable() -> None:
    drawn = []
    for seed in (5, 5, 0):
        with frontend(seed=seed) as (front, link):
            streams = [await front.stream(ask()) for _ in range(3)]
            assert [stream.start.seed for stream in streams] == [add.request.sampling.seed for add in link.adds]
            drawn.append([stream.start.seed for stream in streams])
    assert drawn[0] == drawn[1] != drawn[2]
    assert len({*drawn[0], *drawn[2]}) == 6


async def test_the_request_holds_the_options_of_the_ask() -> None:
    now = time.monotonic()
    with frontend() as (front, link):
        stream = await front.stream(
            ask(
                (5, 6),
                arrival_s=now,
                request_id="mine",
                model="alias",
                owner="key",
                replaces=True,
                stop=StopAsk(max_tokens=9, min_tokens=2, stop_token_ids=(3, 3, 4), max_duration_s=10),
                scheduling=SchedulingAsk(priority=-3, max_queue_duration_s=20, timeout_s=30),
                cache=CacheAsk(salt="s", bypass_prefix_cache=True),
                output=OutputAsk(prompt_token_ids=True),
                deadline_s=now + 25,
            )
        )
        request = link.adds[0].request
        assert (request.request_id, request.prompt_ids, request.owner, request.priority) == ("mine", (5, 6), "key", -3)
        assert (request.deadline_s, request.queue_deadline_s, request.time_limit_s) == (now + 25, now + 20, now + 10)
        assert (request.replaces, request.bypass_prefix_cache) == (True, True)
        assert request.stop.stop_token_ids == (3, 4)
        assert request.stop.min_tokens == 2
        assert stream.start.prompt_token_ids == (5, 6)
        assert (stream.start.request_id, stream.start.model) == ("mine", "small")


@pytest.mark.parametrize(
    ("stop", "least_tokens"),
    [
        (StopAsk(max_tokens=9, ignore_eos=True), 9),
        (StopAsk(max_tokens=9), 0),
        (StopAsk(max_tokens=9, ignore_eos=True, stop_strings=("x",)), 0),
        (StopAsk(max_tokens=9, ignore_eos=True, stop_token_ids=(3,), min_tokens=2), 2),
    ],
)
async def test_the_request_says_how_long_its_outputs_are_at_least(stop: StopAsk, least_tokens: int) -> None:
    with frontend() as (front, link):
        await front.stream(ask((5, 6), stop=stop))
        assert link.adds[0].request.least_tokens == least_tokens


async def test_salts_of_two_owners_differ_and_deadline_is_the_earlier() -> None:
    now = time.monotonic()
    with frontend() as (front, link):
        for owner in ("a", "b"):
            await front.stream(ask(owner=owner, cache=CacheAsk(salt="s")))
        await front.stream(ask(arrival_s=now, deadline_s=now + 90, scheduling=SchedulingAsk(timeout_s=30)))
        assert link.adds[0].request.salt != link.adds[1].request.salt
        assert link.adds[2].request.deadline_s == now + 30


async def test_ignore_eos_removes_eos_from_the_stop_ids() -> None:
    with frontend() as (front, link):
        await front.stream(ask())
        await front.stream(ask(stop=StopAsk(ignore_eos=True)))
        assert [add.request.stop.eos_token_ids for add in link.adds] == [served().eos_token_ids, ()]


async def test_random_request_ids_differ() -> None:
    with frontend() as (front, link):
        for _ in range(3):
            await front.stream(ask())
        assert len({add.request.request_id for add in link.adds}) == 3


async def test_a_model_without_tokenizer_takes_and_gives_ids_only() -> None:
    with frontend(served(None)) as (front, link):
        for wrong, field, feature in (
            (ask("text"), "text", "TEXT"),
            (ask(input=ChatInput((ChatMessage("user", "x"),))), "chat", "CHAT"),
            (ask((1,), output=OutputAsk(text=True)), "output.text", "TEXT"),
            (ask((1,), stop=StopAsk(stop_strings=("x",))), "stop.stop_strings", "TEXT"),
        ):
            with pytest.raises(FeatureNotSupported, match=f"no tokenizer .feature {feature}.") as caught:
                await front.stream(wrong)
            assert caught.value.field == field
        with pytest.raises(FeatureNotSupported):
            await front.detokenize("", (1,), True)
        with pytest.raises(FeatureNotSupported):
            await front.tokenize("", TextInput("x"))
        await front.stream(ask((1,)))
        assert len(link.adds) == 1
        assert front.model("").features == FEATURES


async def test_a_priority_that_would_be_ignored_is_refused() -> None:
    model = served(obeys_priority=False)
    assert "PRIORITY" not in model.facts(None).features
    with frontend(model) as (front, link):
        for priority in (1, -1):
            with pytest.raises(FeatureNotSupported, match="feature PRIORITY") as caught:
                await front.stream(ask(scheduling=SchedulingAsk(priority=priority)))
            assert caught.value.field == "scheduling.priority"
        await front.stream(ask(scheduling=SchedulingAsk(priority=0)))
        assert len(link.adds) == 1


async def test_tokenizer_ids_beyond_the_model_are_refused() -> None:
    with frontend(link=FakeLink(replace_facts(vocab_size=300))) as (front, _), pytest.raises(InvalidRequest) as caught:
        await front.stream(ask("Hello"))
    assert caught.value.field == "text"


async def test_nothing_is_served_before_the_engine_is_ready() -> None:
    with frontend(link=FakeLink(None)) as (front, _), pytest.raises(ModelLoading) as caught:
        await front.stream(ask())
    assert caught.value.retry_after_s


def replace_facts(**changes: object) -> object:
    import msgspec

    return msgspec.structs.replace(FACTS, **changes)
