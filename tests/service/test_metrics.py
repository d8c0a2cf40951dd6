"""The counts of a whole service with two front ends.

Callers, log lines, Prometheus and the engine have the same numbers, and no counter falls when a process dies. The
runner counts nothing, so `make test` does without one; `make test-all` serves a model, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.service.running import WITH_MODEL, WITHOUT_MODEL, RunningService, client, modelless, serving, wait_until
from tests.service.tiny import write_tiny_model

Stub = inference_pb2_grpc.InferenceServiceStub
#: Connections are shared out among front ends.
NUM_CHANNELS = 6
#: How outputs end that the front end ends, not the engine.
ABORTED = ("unspecified", "stop_string", "aborted")


class Page(dict[tuple[str, ...], float]):
    """(name, label values by label name ...) -> value, as scraped."""

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for key, value in self.items() if key[0] == name)


class Observed:
    """A service, its page and its lines."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        (line,) = [line for line in service.lines if "metrics on http" in line]
        self.url = line.partition("metrics on ")[2].removesuffix("metrics")

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def page(self) -> Page:
        return Page(
            {
                (sample.name, *[sample.labels[label] for label in sorted(sample.labels)]): sample.value
                for family in text_string_to_metric_families(self.get("metrics")[1])
                for sample in family.samples
            }
        )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.service.lines if line.startswith("{")]


@pytest.fixture(
    scope="module",
    params=[pytest.param(WITHOUT_MODEL, id="modelless"), pytest.param(WITH_MODEL, id="model", marks=pytest.mark.full)],
)
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    model = write_tiny_model(tmp_path_factory.mktemp("metrics") / "tiny")
    flags = ["--model", str(model), "--load-format", "dummy", "--frontends", "2", "--num-blocks", "36"]
    flags += ["--max-num-seqs", "12", "--metrics-listen", "127.0.0.1:0", "--log-requests"]
    with serving(*flags, program=request.param) as service:
        service.wait_ready()
        yield Observed(service)


class Callers:
    """Requests of every kind, and the usage that those which were answered were told."""

    def __init__(self, stubs: list[Stub]) -> None:
        self._stubs = stubs
        self._random = random.Random(7)
        self.usage: dict[str, tuple[int, int, int]] = {}
        #: Whose call may end before the server has seen the request.
        self.fleeting: set[str] = set()
        self.sent: set[str] = set()

    def request(self, kind: str, max_tokens: int, **fields: Any) -> pb.GenerateRequest:
        request_id = f"{kind}-{len(self.sent)}"
        self.sent.add(request_id)
        text = "".join(self._random.choices("abcdefgh", k=self._random.randint(1, 90)))
        request = pb.GenerateRequest(**({"request_id": request_id, "text": text} | fields))
        request.stop.max_tokens = max_tokens
        request.stop.ignore_eos = True
        return request

    def stub(self) -> Stub:
        return self._random.choice(self._stubs)

    async def unary(self, **fields: Any) -> None:
        request = self.request("unary", 40, **fields)
        response = await self.stub().Generate(request)
        self._told(request.request_id, response.usage)

    async def refused(self, **fields: Any) -> None:
        request = self.request("refused", 10, **fields)
        with pytest.raises(grpc.aio.AioRpcError):
            await self.stub().Generate(request)

    async def stream(self, **fields: Any) -> None:
        request = self.request("stream", 120, **fields)
        async for message in self.stub().StreamGenerate(request):
            if message.HasField("usage"):
                self._told(request.request_id, message.usage)

    async def cancelled(self, num_messages: int) -> None:
        request = self.request("cancelled", 200, sampling={"num_outputs": 2})
        call = self.stub().StreamGenerate(request)
        for _ in range(num_messages):
            await call.read()
        call.cancel()

    async def fleeing(self) -> None:
        request = self.request("fleeing", 200)
        self.fleeting.add(request.request_id)
        call = self.stub().StreamGenerate(request)
        await asyncio.sleep(self._random.random() / 10)
        call.cancel()

    async def late(self) -> None:
        request = self.request("late", 400)
        self.fleeting.add(request.request_id)
        with contextlib.suppress(grpc.aio.AioRpcError):
            response = await self.stub().Generate(request, timeout=0.4)
            self._told(request.request_id, response.usage)

    async def multiplexed(self) -> None:
        kept = [self.request("many", 30 + 10 * number) for number in range(5)]
        cancelled = self.request("many", 300)
        wrong = self.request("many", 5, sampling={"temperature": -1})
        call = self.stub().MultiplexGenerate()
        for request in (*kept, cancelled, wrong):
            await call.write(pb.MultiplexGenerateRequest(generate=request))
        handles: dict[int, str] = {}
        async for frame in call:
            for item in frame.items:
                handles[item.handle] = item.request_id or handles[item.handle]
                if item.response.HasField("usage"):
                    self._told(handles[item.handle], item.response.usage)
                if handles[item.handle] == cancelled.request_id:
                    action = pb.MultiplexGenerateRequest.Cancel(request_id=cancelled.request_id)
                    with contextlib.suppress(asyncio.InvalidStateError):
                        await call.write(pb.MultiplexGenerateRequest(cancel=action))
                        await call.done_writing()

    async def all(self) -> None:
        stops = {"stop_strings": ["a", "e", "0", "Q"]}
        await asyncio.gather(
            *[self.unary() for _ in range(8)],
            *[self.unary(sampling={"num_outputs": 3}) for _ in range(3)],
            *[self.stream() for _ in range(8)],
            *[self.stream(stop=stops, sampling={"num_outputs": 2}) for _ in range(8)],
            *[self.stream(stream={"min_interval": {"nanos": 50_000_000}}) for _ in range(2)],
            *[self.cancelled(number) for number in (1, 1, 2, 5, 9)],
            *[self.fleeing() for _ in range(10)],
            *[self.late() for _ in range(3)],
            *[self.multiplexed() for _ in range(2)],
            self.refused(model="no such model"),
            self.refused(sampling={"temperature": -1}),
            self.refused(text="x" * 5000),
            self.refused(sampling={"num_outputs": 1000}),
        )
        for _ in range(2):
            await self.unary(text="the same prompt, of more than a block or two")

    def _told(self, request_id: str, usage: pb.Usage) -> None:
        self.usage[request_id] = (usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens)


@contextlib.asynccontextmanager
async def callers(address: str) -> AsyncIterator[Callers]:
    async with contextlib.AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(address, options)) for _ in range(NUM_CHANNELS)
        ]
        yield Callers([Stub(channel) for channel in channels])


def is_at_rest(page: Page) -> bool:
    return not (page["photon_num_requests_running",] or page["photon_num_requests_waiting",])


async def test_all_books_say_the_same(observed: Observed) -> None:
    async with callers(observed.service.wait_ready()[0]) as made:
        await made.all()
    told = made.sent - made.fleeting

    def missing() -> set[str]:
        return told - {line["request_id"] for line in observed.lines()}

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not missing(), "every request has its line", limit_s=240.0)
    assert not missing()

    def books() -> tuple[dict[str, float], dict[str, float]]:
        """By the lines, and by the page."""
        lines, page = observed.lines(), observed.page()
        ended = Counter(reason for line in lines for reason in line["finish_reasons"])
        by_lines = {
            "prompt": sum(line["prompt_tokens"] for line in lines),
            "cached": sum(line["cached_prompt_tokens"] for line in lines),
            "output": sum(line["output_tokens"] for line in lines),
            "outputs": sum(ended.values()),
            "requests": len(lines),
        }
        by_page = {
            "prompt": page["photon_request_prompt_tokens_sum",],
            "cached": page["photon_prefix_cache_hits_total",],
            "output": page["photon_request_generation_tokens_sum",],
            "outputs": page.total("photon_engine_outputs_total"),
            "requests": page["photon_requests_answered_total",]
            + page.total("photon_requests_rejected_total")
            + page.total("photon_requests_failed_total")
            + page["photon_requests_cancelled_total",],
        }
        return by_lines, by_page

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: is_at_rest(observed.page()) and books()[0] == books()[1], "they agree", limit_s=240.0)
    by_lines, by_page = books()
    assert by_lines == by_page

    lines, page = {line["request_id"]: line for line in observed.lines()}, observed.page()
    assert len(lines) == by_lines["requests"], "one line for a request"
    preemptions = sum(line["preemptions"] for line in lines.values())
    # Until the engine reads an Abort it may preempt an output of which the line is written.
    aborted = [reason for line in lines.values() for reason in line["finish_reasons"] if reason in ABORTED]
    assert 0 < preemptions <= page["photon_num_preemptions_total",] <= preemptions + len(aborted)
    assert told <= lines.keys() <= made.sent
    for request_id, usage in made.usage.items():
        line = lines[request_id]
        assert (line["prompt_tokens"], line["cached_prompt_tokens"], line["output_tokens"]) == usage
    assert by_lines["prompt"] <= page["photon_prompt_tokens_total",]
    assert by_lines["output"] <= page["photon_generation_tokens_total",]
    answered = Counter(reason for line in lines.values() if not line["reason"] for reason in line["finish_reasons"])
    assert answered == {
        key[1]: value for key, value in page.items() if key[0] == "photon_request_success_total" and value
    }
    reasons = Counter(line["reason"] for line in lines.values())
    assert (
        answered["stop_string"] and answered["max_tokens"] and reasons["CANCELLED"] >= 5 and reasons["MODEL_NOT_FOUND"]
    )
    assert by_lines["cached"], "the run is a mixed one"
    assert page.total("grpc_server_handled_total") == page.total("grpc_server_started_total")


async def test_requests_that_killed_front_ends_take_with_them_are_counted(observed: Observed) -> None:
    service = observed.service
    (address,) = service.wait_ready()
    times, before = len(service.ready_lines()), observed.page()
    request = pb.GenerateRequest(text="def")
    request.stop.max_tokens, request.stop.ignore_eos = 300, True
    async with contextlib.AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        stubs = [
            Stub(await stack.enter_async_context(grpc.aio.insecure_channel(address, options)))
            for _ in range(NUM_CHANNELS)
        ]
        calls = [stub.StreamGenerate(request) for stub in stubs]
        for call in calls:
            await call.read()
        os.kill(service.children()["frontend"], signal.SIGKILL)
        codes = [await end_of(call) for call in calls]
    num_lost = codes.count(grpc.StatusCode.UNAVAILABLE)
    assert num_lost > 0 and codes.count(grpc.StatusCode.OK) == len(calls) - num_lost
    service.wait_ready(times + 1)
    key = ("photon_requests_lost_total",)
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: observed.page()[key] == before[key] + num_lost, "they are counted", 20.0)
    assert observed.page()[key] == before[key] + num_lost


async def end_of(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """How a stream ends that is read to its end."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


def fallen(before: Page, after: Page) -> dict[tuple[str, ...], tuple[float, float]]:
    """Counters that are less than before, or gone."""
    suffixes = ("_total", "_bucket", "_count", "_sum")
    counters = {key: value for key, value in before.items() if key[0].endswith(suffixes)}
    assert len(counters) > 100
    return {
        key: (value, after.get(key, -1.0)) for key, value in counters.items() if after.get(key, -1.0) < value - 1e-6
    }


@contextlib.contextmanager
def scraped(observed: Observed) -> Iterator[list[Page]]:
    """All pages from one to the next, read while the block runs."""
    pages = [observed.page()]
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(0.02):
            pages.append(observed.page())

    scraping = threading.Thread(target=scrape)
    scraping.start()
    try:
        yield pages
    finally:
        is_over.set()
        scraping.join()
    for before, after in itertools.pairwise(pages):
        assert not fallen(before, after)


@pytest.mark.parametrize("victim", ["frontend", "engine"])
def test_no_counter_falls_when_a_process_is_killed(observed: Observed, victim: str) -> None:
    service = observed.service
    (address,) = service.wait_ready()
    times = len(service.ready_lines())
    build = [key for key in observed.page() if key[0] == "photon_build_info"]
    assert len(build) == 1
    with scraped(observed) as pages, client(address) as call:
        call.generate(max_tokens=20)
        os.kill(service.children()[victim], signal.SIGKILL)
        if victim == "engine":
            wait_until(lambda: observed.get("readyz") == (503, "NOT_SERVING\n"), "not ready")
            assert observed.get("healthz") == (200, "SERVING\n")
            assert [key for key in observed.page() if key[0] == "photon_build_info"] == build
        service.wait_ready(times + 1)
        call.generate(max_tokens=20, wait_for_ready=True)
        tokens = pages[0]["photon_generation_tokens_total",] + 20
        wait_until(lambda: pages[-1]["photon_generation_tokens_total",] >= tokens, "the new process counts, too")
    assert observed.get("readyz") == (200, "SERVING\n")
    key = ("photon_restarts_total", victim)
    assert pages[-1][key] == pages[0][key] + 1


def test_a_unary_call_that_is_lost_with_the_engine_is_not_billed(observed: Observed) -> None:
    service = observed.service
    (address,) = service.wait_ready()
    times = len(service.ready_lines())
    before = observed.page()
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = pb.GenerateRequest(request_id="lost", text="def")
        request.stop.max_tokens = 400
        request.stop.ignore_eos = True
        unary = Stub(channel).Generate.future(request, timeout=60)
        request.request_id = "beside it"
        beside = Stub(channel).StreamGenerate(request, timeout=60)
        for _ in range(20):
            next(beside)
        os.kill(service.children()["engine"], signal.SIGKILL)
        assert unary.code() is grpc.StatusCode.UNAVAILABLE
    service.wait_ready(times + 1)
    rejected = ("photon_requests_rejected_total", "ENGINE_RESTARTING")
    wait_until(lambda: observed.page().get(rejected, 0.0) == before.get(rejected, 0.0) + 1, "it is counted")
    assert observed.page()["photon_requests_failed_total", "ENGINE_RESTARTING"] == 0
    wait_until(lambda: "lost" in {line["request_id"] for line in observed.lines()}, "it has its line")
    (line,) = [line for line in observed.lines() if line["request_id"] == "lost"]
    assert (line["reason"], line["output_tokens"]) == ("ENGINE_RESTARTING", 0)


def test_scrapers_that_are_stuck_disturb_nothing(observed: Observed) -> None:
    (address,) = observed.service.wait_ready()
    host, port = observed.url.removeprefix("http://").rstrip("/").split(":")
    with contextlib.ExitStack() as stack:
        stuck = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        for each in stuck[20:]:
            each.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 50)
        with client(address) as call:
            assert call.generate(max_tokens=5).usage.output_tokens == 5
        assert observed.get("readyz") == (200, "SERVING\n")


def test_a_drain_is_counted_while_it_lasts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    flags = ["--model", str(model), "--load-format", "dummy", "--metrics-listen", "127.0.0.1:0", "--log-requests"]
    with modelless(*flags) as service:
        (address,) = service.wait_ready()
        observed = Observed(service)
        with client(address) as call:
            stream = call.stream()
            next(stream)
            service.process.send_signal(signal.SIGTERM)
            wait_until(lambda: observed.get("readyz")[0] == 503, "it drains")
            before = observed.page()["photon_generation_tokens_total",]

            def tokens() -> float:
                return observed.page()["photon_generation_tokens_total",] - before

            wait_until(lambda: tokens() > 20, "what the drain computes is counted")
            stream.cancel()
        assert service.process.wait() == 0


def test_requests_of_a_front_end_killed_while_it_drains_are_counted_as_lost(tmp_path: Path) -> None:
    """With a second one: without, the service and its pages end with the first."""
    model = write_tiny_model(tmp_path / "tiny")
    flags = [
        "--model",
        str(model),
        "--load-format",
        "dummy",
        "--metrics-listen",
        "127.0.0.1:0",
        "--frontends",
        "2",
    ]
    with modelless(*flags) as service, contextlib.ExitStack() as stack:
        (address,) = service.wait_ready()
        observed = Observed(service)
        # Hardly ever all at one of them.
        streams = [stack.enter_context(client(address)).stream() for _ in range(10)]
        for stream in streams:
            next(stream)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: observed.get("readyz")[0] == 503, "it drains")
        os.kill(service.children()["frontend"], signal.SIGKILL)
        wait_until(lambda: observed.page().total("photon_requests_lost_total") > 0, "its requests are counted as lost")
        for stream in streams:
            stream.cancel()
        assert service.process.wait() == 0
