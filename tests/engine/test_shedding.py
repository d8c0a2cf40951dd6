"""Requests that wait and cannot be in time any more are ended before they cost a prompt; on a clock of its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.frames import Abort
from photon_grpc.core.ports import Pending
from photon_grpc.engine import engine, engine_stats
from tests.engine.harness import Harness, Setting

NUM_SLOTS = 8
NUM_PROMPT = 20
#: A step, and each of its tokens.
STEP_S, TOKEN_S = 0.01, 0.0005
DEADLINE_S = 6.0

Length = Callable[[random.Random], int]


@dataclass
class Clock:
    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(engine, "time", made)
    monkeypatch.setattr(engine_stats, "time", made)
    return made


class Timed:
    """A step that takes time to be read."""

    def __init__(self, pending: Pending, duration_s: float, clock: Clock) -> None:
        self.drafts, self.sample = pending.drafts, pending.sample
        self._pending, self._duration_s, self._clock = pending, duration_s, clock

    def result(self) -> StepOutput:
        self._clock.now_s += self._duration_s
        return msgspec.structs.replace(self._pending.result(), duration_s=self._duration_s)


@dataclass
class Service:
    clock: Clock
    setting: Setting = field(
        default_factory=lambda: Setting(
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=64,
            num_blocks=1000,
            max_model_len=512,
            prefix_caching=False,
            windows=(0,),
        )
    )
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.h = Harness(self.setting)
        self._submit = self.h.runner.submit
        self.h.runner.submit = self._timed  # type: ignore[method-assign]

    def _timed(self, batch: Batch) -> Timed:
        num_tokens = sum(batch.counts)
        self.num_computed += num_tokens
        return Timed(self._submit(batch), STEP_S + TOKEN_S * num_tokens, self.clock)

    def add(self, number: int, max_tokens: int, deadline_s: float | None, arrival_s: float | None = None) -> int:
        arrival_s = self.clock.now_s if arrival_s is None else arrival_s
        due_s = None if deadline_s is None else arrival_s + deadline_s
        prompt = [(number + at) % 90 for at in range(NUM_PROMPT)]
        return self.h.add(prompt, max_tokens, arrival_s=arrival_s, deadline_s=due_s)

    def step(self) -> None:
        self.h.engine.step()
        self.h._collect()

    @property
    def has_work(self) -> bool:
        return bool(self.h.scheduler.live.has_work() or self.h.post.inbox)


@dataclass
class Figures:
    """Results of a load: requests a second that the slots can serve, finished ones, and the share of wasted tokens."""

    capacity: float
    finished: int
    reasons: Counter[str]
    wasted: float
    duration_s: float


def open_loop(clock: Clock, load: float, length: Length, num_requests: int, *, limited: bool = True) -> Figures:
    """Serve Poisson arrivals at `load` times what the slots can serve.

    Each output ends at a random length, which is its max_tokens, or without `limited` that of a stop string, which the
    engine does not know.
    """
    service, draw = Service(clock), random.Random(1)
    mean = sum(length(draw) for _ in range(1000)) / 1000
    capacity = NUM_SLOTS / (mean * (STEP_S + TOKEN_S * NUM_SLOTS * (1 + NUM_PROMPT / mean)))
    began_s = clock.now_s
    arrivals: list[tuple[float, int]] = []
    at_s = began_s
    for _ in range(num_requests):
        at_s += draw.expovariate(load * capacity)
        arrivals.append((at_s, length(draw)))
    ends: dict[int, int] = {}
    stopped: set[int] = set()
    while len(ends) < num_requests or service.has_work:
        if not service.has_work:
            clock.now_s = max(clock.now_s, arrivals[len(ends)][0])
        while len(ends) < num_requests and arrivals[len(ends)][0] <= clock.now_s:
            arrival_s, num_tokens = arrivals[len(ends)]
            handle = service.add(len(ends), num_tokens if limited else 400, DEADLINE_S, arrival_s)
            ends[handle] = num_tokens
        service.step()
        for handle, num_tokens in ends.items() if not limited else ():
            if handle not in stopped and len(service.h.outcomes[handle].ids) >= num_tokens:
                stopped.add(handle)
                service.h.post.put(Abort((handle,), by_stop_string=True))
    outcomes = [service.h.outcomes[handle] for handle in ends]
    failed = [outcome for outcome in outcomes if outcome.failed is not None]
    wasted = sum(NUM_PROMPT + len(outcome.ids) - 1 for outcome in failed if outcome.ids)
    reasons = Counter(outcome.failed.reason for outcome in failed if outcome.failed is not None)
    num_finished = num_requests - len(failed)
    return Figures(capacity, num_finished, reasons, wasted / service.num_computed, clock.now_s - began_s)


def equal(draw: random.Random) -> int:
    return 40


def varied(draw: random.Random) -> int:
    return min(200, max(2, int(draw.lognormvariate(3.5, 0.8))))


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("length", [equal, varied])
def test_under_overload_few_tokens_go_into_requests_that_expire(clock: Clock, length: Length, limited: bool) -> None:
    figures = open_loop(clock, 5.0, length, 300, limited=limited)
    assert figures.wasted < 0.01, figures
    # As much is served as the slots can serve; without shedding, half of that.
    assert figures.finished / figures.duration_s > 0.8 * figures.capacity, figures


@pytest.mark.parametrize("limited", [True, False])
def test_at_ten_times_saturation_throughput_stays_at_capacity(clock: Clock, limited: bool) -> None:
    figures = open_loop(clock, 10.0, equal, 600, limited=limited)
    assert figures.finished / figures.duration_s >= 0.95 * figures.capacity, figures
    assert figures.wasted < 0.01, figures


def test_without_overload_no_request_is_ended_on_an_estimate(clock: Clock) -> None:
    figures = open_loop(clock, 0.7, varied, 150)
    assert figures.finished == 150, figures


def test_a_request_whose_turn_comes_too_late_costs_nothing(clock: Clock) -> None:
    service = Service(clock, Setting(max_num_seqs=1, max_num_batched_tokens=64, num_blocks=1000, windows=(0,)))
    for number in range(3):
        service.add(number, 50, None)
    late = service.add(7, 50, 2.0)
    after = service.add(8, 50, None)
    while service.has_work:
        service.step()
    failed = service.h.outcomes[late].failed
    assert failed is not None and failed.reason == "DEADLINE_UNREACHABLE"
    assert failed.needed is not None and failed.limit is not None and 0 < failed.limit < failed.needed
    assert service.num_computed == 4 * (NUM_PROMPT + 49)
    assert service.h.outcomes[after].finished is not None and service.h.idle()


def test_a_request_that_waited_less_than_it_has_left_is_tried(clock: Clock) -> None:
    """An output may be shorter than those before it."""
    service = Service(clock, Setting(max_num_seqs=1, max_num_batched_tokens=64, num_blocks=1000, windows=(0,)))
    service.add(1, 60, None)
    while service.has_work:
        service.step()
    service.add(2, 10, None)
    chance = service.add(3, 60, 0.6)
    while service.has_work:
        service.step()
    assert len(service.h.outcomes[chance].ids) > 1


def test_all_outputs_of_an_ended_request_end(clock: Clock) -> None:
    service = Service(clock, Setting(max_num_seqs=1, max_num_batched_tokens=64, num_blocks=1000, windows=(0,)))
    service.add(1, 60, None)
    service.add(2, 60, None)
    while len(service.h.outcomes[0].ids) < 5:
        service.step()
    several = service.h.add(list(range(30)), 60, num_outputs=3, arrival_s=clock.now_s, deadline_s=clock.now_s + 1.9)
    while service.has_work:
        service.step()
    reasons = {service.h.outcomes[several + index].failed.reason for index in range(3)}
    assert reasons == {"DEADLINE_UNREACHABLE"} and service.h.idle()


def test_the_last_output_of_a_request_that_has_begun_is_not_refused_on_an_estimate(clock: Clock) -> None:
    """Two run at a time, and some may be complete: only the deadline itself ends it."""
    service = Service(clock, Setting(max_num_seqs=2, max_num_batched_tokens=64, num_blocks=1000, windows=(0,)))
    service.add(1, 200, None)
    while service.has_work:
        service.step()
    due_s = clock.now_s + 0.85
    prompt = list(range(NUM_PROMPT))
    # A stop id, so that an output may be short.
    first = service.h.add(prompt, 200, num_outputs=6, stop=(98,), arrival_s=clock.now_s, deadline_s=due_s)
    outcomes = [service.h.outcomes[first + number] for number in range(6)]
    stopped: set[int] = set()
    while service.has_work:
        service.step()
        for number, outcome in enumerate(outcomes):
            if len(outcome.ids) >= 20 and number not in stopped:
                # A stop string, which no estimate knows.
                stopped.add(number)
                service.h.post.put(Abort((first + number,), by_stop_string=True))
    assert [outcome.failed for outcome in outcomes] == [None] * 6
    assert min(len(outcome.ids) for outcome in outcomes) >= 20
