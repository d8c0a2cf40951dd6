"""Records of requests add up to the counters of the engine, with a real front end and engine and a fake runner."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.bridge.local import LocalClient
from photon_grpc.core.ask import SamplingAsk, StopAsk
from photon_grpc.core.frames import Down
from photon_grpc.core.ports import EngineLink, EnginePorts
from photon_grpc.core.request import FinishReason
from photon_grpc.core.stats import Load
from photon_grpc.engine.engine import Engine
from photon_grpc.frontend.encoder import ThreadEncoder
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.record import Observers, RequestRecord
from photon_grpc.frontend.stream import TokenStream
from tests.engine.harness import Harness, Setting, windows
from tests.examples import examples
from tests.frontend.fake_engine import FakeLink, ask, served

#: The fake runner draws among 97 ids, each a character: an output of thirty tokens meets one of these nine times in
#: ten.
STOPS = tuple("aeiou0:")


class Wire(FakeLink):
    """Between the two, without a thread: what either says is there when the other looks."""

    def __init__(self, harness: Harness) -> None:
        super().__init__(harness.facts)
        self._post = harness.post
        self._num_read = 0

    def send(self, frame: Down) -> None:
        super().send(frame)
        self._post.put(frame)

    def deliver(self) -> None:
        frames = self._post.sent[self._num_read :]
        self._num_read = len(self._post.sent)
        for _, frame in frames:
            self.on_frame(frame)


@dataclass
class Ledger:
    """The sums over records."""

    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0

    def ended(self, record: RequestRecord) -> None:
        """As a RequestObserver."""
        usage = record.usage
        self.output_tokens += usage.output_tokens
        self.prompt_tokens += usage.prompt_tokens
        self.cached_prompt_tokens += usage.cached_prompt_tokens
        self.preemptions += record.num_preemptions
        ended = sum(reason is not FinishReason.UNSPECIFIED for reason in record.finish_reasons)
        self.finished += ended
        self.cancelled += len(record.finish_reasons) - ended
        assert record.reason == ("" if ended == len(record.finish_reasons) else "CANCELLED")

    @classmethod
    def of(cls, load: Load) -> Ledger:
        return cls(
            load.output_tokens,
            load.prompt_tokens,
            load.cached_prompt_tokens,
            load.preemptions,
            load.finished,
            load.cancelled,
        )


asked = st.tuples(
    st.integers(1, 12),  # prompt tokens
    st.integers(1, 30),  # max_tokens
    st.integers(1, 3),  # outputs
    st.booleans(),  # stop strings
    st.integers(0, 5),  # steps before the next one comes
    st.none() | st.integers(0, 9),  # whom to cancel then
)


def new_frontend(link: EngineLink, pool: ThreadPoolExecutor, ledger: Ledger) -> Frontend:
    encoder = ThreadEncoder(served(), pool)
    return Frontend(link=link, model=served(), encoder=encoder, seed=5, observers=Observers([ledger]))


async def play(h: Harness, requests: list[tuple[int, int, int, bool, int, int | None]]) -> tuple[Ledger, list]:
    wire = Wire(h)
    streams: list[TokenStream] = []
    ledger = Ledger()
    with ThreadPoolExecutor(1) as pool:
        front = new_frontend(wire, pool, ledger)

        def step() -> None:
            if h.post.inbox or h.scheduler.live.has_work():
                h.engine.step()
                wire.deliver()

        for num_prompt, max_tokens, num_outputs, has_stops, num_steps, victim in requests:
            stop = StopAsk(max_tokens=max_tokens, stop_strings=STOPS if has_stops else (), ignore_eos=True)
            sampling = SamplingAsk(num_outputs=min(num_outputs, h.facts.max_num_seqs))
            streams.append(await front.stream(ask(tuple(range(num_prompt)), sampling=sampling, stop=stop)))
            for _ in range(num_steps):
                step()
            if victim is not None and victim < len(streams):
                streams[victim].close()
        while h.post.inbox or h.scheduler.live.has_work():
            step()
        h.run()
        for stream in streams:
            async for update in stream:
                if update.usage is not None:
                    assert update.usage == stream.usage()
    return ledger, streams


@given(
    st.builds(
        Setting,
        num_blocks=st.integers(12, 30),
        block_size=st.sampled_from([4, 8]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(2, 40),
        depth=st.integers(0, 1),
        prefix_caching=st.booleans(),
        max_model_len=st.just(44),
        windows=windows,
    ),
    st.lists(asked, min_size=1, max_size=10),
)
@settings(max_examples=examples(100), deadline=None)
def test_usage_over_all_streams_is_what_the_engine_counted(setting: Setting, requests: list) -> None:
    h = Harness(setting)
    ledger, _ = asyncio.run(play(h, requests))
    load = h.post.loads[-1]
    assert ledger == Ledger.of(load)
    assert load.failed == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_preemptions_of_outputs_that_a_stop_string_ends_are_told_to_their_callers(depth: int) -> None:
    h = Harness(Setting(num_blocks=14, max_num_seqs=6, depth=depth, prefix_caching=False, max_model_len=50))
    ledger, streams = asyncio.run(play(h, [(12, 30, 1, True, 0, None)] * 6))
    stopped = [stream for stream in streams if stream.outputs[0].finish.reason is FinishReason.STOP_STRING]
    assert sum(stream._measured.num_preemptions for stream in stopped) > 0
    assert ledger == Ledger.of(h.post.loads[-1])


async def test_the_engine_has_counted_all_that_is_billed_and_what_was_under_way_when_an_output_ended() -> None:
    """Two threads: the engine runs ahead of the front end, which drops what comes too late."""
    h = Harness(Setting(num_blocks=60, block_size=8, depth=1))
    client = LocalClient(asyncio.get_running_loop(), h.facts)
    host = client.host()
    engine = Engine(h.scheduler, h.runner, EnginePorts(host, host, h.post, load_interval_s=0.0), h.facts)
    running = asyncio.create_task(asyncio.to_thread(engine.run))
    with ThreadPoolExecutor(1) as pool:
        ledger = Ledger()
        #: Prompt and output tokens of requests that nothing ends before max_tokens.
        whole: list[tuple[int, int]] = []
        front = new_frontend(client, pool, ledger)

        async def one(number: int) -> None:
            has_stops = number % 2 == 1
            stop = StopAsk(max_tokens=30, stop_strings=STOPS if has_stops else (), ignore_eos=True)
            sampling = SamplingAsk(num_outputs=2)
            async with await front.stream(ask((number,) * 5, sampling=sampling, stop=stop)) as stream:
                if number % 7 == 0:
                    return
                async for _ in stream:
                    if number % 5 == 0:
                        return
                if not has_stops:
                    whole.append((stream.usage().prompt_tokens, stream.usage().output_tokens))

        await asyncio.gather(*[one(number) for number in range(40)])
        for _ in range(1000):
            if front.load.finished + front.load.cancelled == 80:
                break
            await asyncio.sleep(0.01)
    load = front.load
    assert load.finished + load.cancelled == ledger.finished + ledger.cancelled == 80
    assert set(whole) == {(5, 60)}
    assert ledger.output_tokens <= load.output_tokens <= 40 * 60
    assert ledger.prompt_tokens <= load.prompt_tokens <= 40 * 5
    assert ledger.cached_prompt_tokens <= load.cached_prompt_tokens
    host.close()
    await running
