"""However the steps of an engine and the frames of a stream fall together, every request of it is told the same."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.ask import Ask, IdsInput, Origin, OutputAsk, SamplingAsk, StopAsk
from photon_grpc.core.generation import Start, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.output.update import OutputDelta, Update
from photon_grpc.observe.failure_log import FailureLog
from photon_grpc.server.multiplex import Admitted, MultiplexCall
from photon_grpc.server.wire import codec
from photon_grpc.server.wire.frames import ItemWriter
from photon_grpc.v1 import inference_pb2 as pb
from tests.examples import examples
from tests.frontend.fake_engine import FakeLink, done, frontend, served

NUM_REQUESTS = 3
MODEL = served()
REQUESTS = st.integers(0, NUM_REQUESTS - 1)
#: Ids of bytes and of words: characters in pieces, too.
TOKENS = st.dictionaries(REQUESTS, st.integers(0, 399))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), TOKENS),
        st.tuples(st.just("finish"), REQUESTS),
        st.tuples(st.just("cancel"), REQUESTS),
        st.tuples(st.just("frame"), st.none()),
    ),
    max_size=40,
)


class Stream:
    """A multiplexed call without gRPC, and a model of what each of its requests must be told."""

    def __init__(self, call: MultiplexCall, link: FakeLink) -> None:
        self.call = call
        self.link = link
        self.ids: dict[int, list[int]] = {number: [] for number in range(NUM_REQUESTS)}
        self.ends: dict[int, str] = {}
        self.told: dict[int, list[pb.MultiplexItem]] = defaultdict(list)

    async def happen(self, kind: str, what: Any) -> None:
        if kind == "step":
            tokens = {number: id for number, id in what.items() if number not in self.ends}
            for number, id in tokens.items():
                self.ids[number].append(id)
            self.link.step(*[(number + 1, id) for number, id in tokens.items()])
        elif kind == "frame":
            frame = pb.MultiplexGenerateResponse.FromString(await self.call._frame())
            assert len({item.handle for item in frame.items}) == len(frame.items)
            for item in frame.items:
                self.told[item.handle - 1].append(item)
        elif what not in self.ends:
            self.ends[what] = kind
            if kind == "cancel":
                self.call._cancel(str(what))
            else:
                self.link.step(finished=(done(what + 1, FinishReason.MAX_TOKENS),))

    def check(self, number: int) -> None:
        items = self.told[number]
        *responses, last = items
        assert all(item.HasField("response") for item in responses)
        assert [item.response.sequence for item in responses] == list(range(1, len(items)))
        assert [item.request_id for item in items] == [
            str(number) if not at or item.HasField("error") else "" for at, item in enumerate(items)
        ]
        ids = [id for item in items for delta in item.response.deltas for id in delta.token_ids]
        text = "".join(delta.text for item in items for delta in item.response.deltas)
        assert not any(item.response.HasField("timing") for item in responses)
        if self.ends[number] == "cancel":
            assert last.error.code == 1 and ids == self.ids[number][: len(ids)]
            return
        assert last.response.HasField("timing") and last.response.usage.output_tokens == len(ids)
        assert ids == self.ids[number] and text == whole_text(ids)


def whole_text(ids: list[int]) -> str:
    assert MODEL.tokenizer is not None
    detokenizer = MODEL.tokenizer.detokenizer(skip_special_tokens=True, prompt_ids=(70,))
    return "".join([detokenizer.push(id) for id in ids]) + detokenizer.finish()


@settings(max_examples=examples(60))
@given(EVENTS)
def test_merged_or_not_every_request_is_told_the_same(events: list[tuple[str, Any]]) -> None:
    async def play() -> None:
        with frontend(MODEL) as (asked, link):
            stream = Stream(MultiplexCall(admit, lambda request_id, error: None, FailureLog()), link)
            for number in range(NUM_REQUESTS):
                await join(stream.call, str(number), await asked.stream(ask(str(number))))
            for kind, what in [*events, *[("finish", number) for number in range(NUM_REQUESTS)], ("frame", None)]:
                await stream.happen(kind, what)
            for number in range(NUM_REQUESTS):
                stream.check(number)
            assert await stream.call._frame() == b"" and not stream.call._members

    asyncio.run(play())


def ask(request_id: str) -> Ask:
    return Ask(
        IdsInput((70,)),
        Origin(0.0, request_id),
        sampling=SamplingAsk(temperature=0.0),
        stop=StopAsk(max_tokens=90, ignore_eos=True),
        output=OutputAsk(token_ids=True),
    )


async def admit(request: pb.GenerateRequest) -> Admitted:
    raise NotImplementedError


async def join(call: MultiplexCall, request_id: str, stream: Any) -> None:
    """Have the request admitted."""

    async def admitted(request: pb.GenerateRequest) -> Admitted:
        return Admitted(stream)

    call._admit = admitted
    call._act(pb.MultiplexGenerateRequest(generate=pb.GenerateRequest(request_id=request_id)))
    await asyncio.sleep(0)


DELTAS = st.builds(
    OutputDelta,
    index=st.integers(0, 300),
    text=st.text(max_size=300),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple),
)


@given(st.lists(DELTAS, max_size=4).map(tuple), st.integers(1, 2**32 - 1), st.integers(1, 2**62))
def test_items_written_by_hand_are_those_of_protobuf(
    deltas: tuple[OutputDelta, ...], handle: int, sequence: int
) -> None:
    writer = ItemWriter(handle, "id")
    writer.responses.sequence, writer.responses.has_begun = sequence, True
    written = writer.plain(Update(deltas))
    assert written is not None
    item = pb.MultiplexItem(handle=handle, response=codec.stream_message(Update(deltas), sequence + 1, None))
    assert pb.MultiplexGenerateResponse.FromString(written) == pb.MultiplexGenerateResponse(items=[item])


def test_only_the_first_item_names_its_request() -> None:
    writer = ItemWriter(7, "id")
    update = Update((OutputDelta(0, "x"),), Usage(1, 0, 1))
    for number in (1, 2):
        assert writer.plain(update) is None
        written = asyncio.run(writer.full(update, Start("id", "demo", 7, 0.0)))
        (item,) = pb.MultiplexGenerateResponse.FromString(written).items
        assert item.response.deltas == codec.stream_message(update, number, None).deltas
        assert (item.handle, item.request_id, item.response.sequence) == (7, "id" if number == 1 else "", number)
