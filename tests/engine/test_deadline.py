"""A deadline that no measured step can meet is refused on arrival; any other is not."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.constraint import Constraint
from photon_grpc.core.frames import Add
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.engine.scheduler.deadline import check_deadline, fewest_samples
from photon_grpc.engine.scheduler.step_time_estimator import StepTimeEstimator
from photon_grpc.errors import DeadlineUnreachable
from tests.engine.harness import Harness, Setting
from tests.engine.tables import END, Table
from tests.examples import examples

PROMPT = list(range(80))
#: May end an output, so that its length is not sure.
STOP = (511,)
#: A step of 32 tokens takes at least half of what the fastest of 32 to 63 took.
SETTING = Setting(max_num_batched_tokens=32)


def measured(h: Harness, step_s: float = 40.0) -> Harness:
    """Measure three steps of every size with this duration."""
    for num_tokens in (1, 2, 4, 8, 16, 32, 64):
        for _ in range(3):
            h.engine.step_times.stepped(num_tokens, step_s)
    return h


def fate(h: Harness, handle: int) -> str:
    h.run()
    outcome = h.outcomes[handle]
    return outcome.failed.reason if outcome.failed is not None else "FINISHED"


def due_in(seconds: float) -> dict[str, float]:
    return {"deadline_s": time.monotonic() + seconds}


def test_a_prompt_that_takes_longer_than_is_left_is_refused_with_both_numbers() -> None:
    h = measured(Harness(SETTING))
    # 32, 32 and 16 tokens.
    handle = h.add(PROMPT, 4, stop=STOP, **due_in(50.0))
    assert fate(h, handle) == "DEADLINE_UNREACHABLE"
    failed = h.outcomes[handle].failed
    assert failed is not None and (failed.needed, failed.limit) == (60_000, pytest.approx(50_000, abs=10_000))
    assert h.idle() and not h.runner.batches


def test_with_time_enough_it_runs() -> None:
    h = measured(Harness(SETTING))
    assert fate(h, h.add(PROMPT, 4, stop=STOP, **due_in(75.0))) == "FINISHED"


def test_tokens_that_must_be_sampled_take_their_steps() -> None:
    """The first comes with the prompt; those that an output continues from are computed, not drawn."""
    h = measured(Harness(SETTING))
    more = {"bypass_prefix_cache": True, "stop": STOP}
    assert fate(h, h.add(PROMPT, 9, min_tokens=1, **more, **due_in(75.0))) == "FINISHED"
    assert fate(h, h.add(PROMPT, 9, min_tokens=3, **more, **due_in(75.0))) == "DEADLINE_UNREACHABLE"
    given = {"continued_ids": (5, 6)}
    assert fate(h, h.add(PROMPT[:30], 9, min_tokens=3, **given, **more, **due_in(35.0))) == "FINISHED"
    assert fate(h, h.add(PROMPT[:30], 9, min_tokens=3, **given, **more, **due_in(15.0))) == "DEADLINE_UNREACHABLE"
    assert fate(h, h.add(PROMPT[:30], 9, min_tokens=1, **more, **due_in(39.0))) == "FINISHED"


@pytest.mark.parametrize("times", [0, 1, 2])
def test_nothing_is_refused_on_too_few_measurements(times: int) -> None:
    """One step may have met a pause of the machine; those refused for it would never put it right."""
    h = Harness(SETTING)
    for _ in range(times):
        h.engine.step_times.stepped(32, 100.0)
    assert fate(h, h.add(PROMPT, 4, **due_in(30.0))) == "FINISHED"


def test_one_fast_step_outweighs_slow_ones() -> None:
    h = measured(Harness(SETTING))
    for num_tokens in (1, 16, 32):
        h.engine.step_times.stepped(num_tokens, 0.01)
    assert fate(h, h.add(PROMPT, 4, **due_in(30.0))) == "FINISHED"


def test_what_the_prefix_cache_holds_takes_no_time() -> None:
    h = Harness(SETTING)
    h.add(PROMPT, 4)
    h.run()
    h.engine.step_times = h.scheduler.deadlines.step_times = StepTimeEstimator()
    measured(h)
    assert fate(h, h.add(PROMPT, 4, stop=STOP, **due_in(30.0))) == "FINISHED"
    h.engine.step_times = h.scheduler.deadlines.step_times = StepTimeEstimator()
    measured(h)
    assert fate(h, h.add(PROMPT, 4, stop=STOP, bypass_prefix_cache=True, **due_in(30.0))) == "DEADLINE_UNREACHABLE"


def long_measured(h: Harness, step_s: float) -> Harness:
    """As after an output of some length."""
    for num_tokens in (1, 32, 64):
        for _ in range(16):
            h.engine.step_times.stepped(num_tokens, step_s)
    return h


def test_an_output_that_nothing_ends_before_max_tokens_takes_so_many_steps() -> None:
    h = long_measured(Harness(SETTING), 1.0)
    # A step of one token takes at least half of what the fastest of its bucket took.
    assert fate(h, h.add([1, 2], 200, **due_in(50.0))) == "DEADLINE_UNREACHABLE"
    assert fate(h, h.add([1, 2], 90, **due_in(50.0))) == "FINISHED"
    assert fate(h, h.add([1, 2], 200, stop=STOP, **due_in(50.0))) == "FINISHED"


@pytest.mark.parametrize("num_measured", [3, 15])
def test_a_few_measured_steps_predict_little(num_measured: int) -> None:
    """The first are slow; were long outputs refused for them, nothing would be measured that puts it right."""
    h = Harness(SETTING)
    for _ in range(num_measured):
        h.engine.step_times.stepped(1, 1.0)
    assert h.engine.step_times.least_decode_s(200) == num_measured * 0.5
    assert fate(h, h.add([1, 2], 200, **due_in(50.0))) == "FINISHED"


def test_what_may_be_answered_before_the_deadline_is_not_refused() -> None:
    """By its time limit, or by the ids that it continues from."""
    h = long_measured(Harness(SETTING), 40.0)
    limit_s = time.monotonic() + 0.01
    limited = h.add(PROMPT, 40, time_limit_s=limit_s, **due_in(5.0))
    assert fate(h, limited) == "FINISHED"
    assert fate(h, h.add(PROMPT, 4, continued_ids=(1, 2, 3, 4), **due_in(5.0))) == "FINISHED"
    assert fate(h, h.add(PROMPT, 4, continued_ids=(1, *STOP), stop=STOP, **due_in(5.0))) == "FINISHED"
    assert fate(h, h.add(PROMPT, 4, continued_ids=(1, 2, 3), **due_in(5.0))) == "DEADLINE_UNREACHABLE"


def test_a_constraint_takes_its_fewest_tokens() -> None:
    h = long_measured(Harness(SETTING), 1.0)
    long, short = (Constraint("regex", "", least_tokens=num) for num in (150, 20))
    stopped = StopParams(200, stop_token_ids=STOP, has_stop_strings=True)
    assert _fate_of(h, constraint=long) == "DEADLINE_UNREACHABLE"
    assert _fate_of(h, constraint=short) == "FINISHED"
    # One that is complete ends below min_tokens, a stop string anywhere behind them.
    assert _fate_of(h, constraint=short, stop=StopParams(200, min_tokens=180)) == "FINISHED"
    assert _fate_of(h, constraint=long, stop=stopped) == "FINISHED"
    assert _fate_of(h, constraint=None, stop=stopped) == "FINISHED"
    # What ends an output may not be drawn.
    only = SamplingParams(allowed_token_ids=(1, 2))
    assert _fate_of(h, sampling=only, stop=StopParams(200, stop_token_ids=STOP)) == "DEADLINE_UNREACHABLE"
    assert _fate_of(h, sampling=only, stop=StopParams(200, stop_token_ids=(2,))) == "FINISHED"


def _fate_of(h: Harness, **changes: object) -> str:
    handle = h.add([1, 2], 200, bypass_prefix_cache=True, **due_in(50.0))
    change(h, changes)
    return fate(h, handle)


def change(h: Harness, changes: dict[str, object]) -> Request:
    """Of the request that was added last."""
    frontend, add = h.post.inbox.pop()
    assert isinstance(add, Add)
    request = msgspec.structs.replace(add.request, **changes)
    h.post.inbox.append((frontend, Add(add.handle, request)))
    return request


IDS = st.lists(st.integers(0, END), max_size=40).map(tuple)
#: Three ids, of which the third is the last; a pair and another; anything, and then an end of one way.
TABLES = (
    Table(({0: 1, 1: 1}, {2: 2}, {3: 3}, {}), frozenset({3})),
    Table(({0: 1}, {1: 0, 2: 2}, {}), frozenset({0, 2})),
)
LEAST = (3, 0)


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(1, 500), st.integers(1, 12), IDS, st.integers(0, 12), st.sampled_from([None, 0, 1]))
def test_no_output_is_shorter_than_the_assumed_minimum(
    prompt: int, max_tokens: int, stop: tuple[int, ...], num_given: int, table: int | None
) -> None:
    """Beside what the engine draws. What continues is the beginning of an output of the same request."""
    h = Harness()
    more: dict[str, Any] = {"seed": prompt, "stop": stop}
    changes: dict[str, object] = {}
    if table is not None:
        more = {"seed": prompt, "stop": (END,), "table": TABLES[table]}
        changes = {"constraint": Constraint("regex", "", least_tokens=LEAST[table])}
    whole = h.add([prompt], max_tokens, **more)
    sure = change(h, changes).least_tokens
    h.run()
    ids = tuple(h.outcomes[whole].ids)
    assert h.outcomes[whole].failed is None and sure <= len(ids)
    rest = h.add([prompt], max_tokens, continued_ids=ids[:num_given], **more)
    sure_rest = fewest_samples(change(h, {**changes, "deadline_s": time.monotonic() + 60.0}))
    h.run()
    assert h.outcomes[rest].failed is None and sure_rest <= len(h.outcomes[rest].ids)


def test_every_output_of_a_refused_request_is_reported() -> None:
    h = measured(Harness(SETTING))
    first = h.add(PROMPT, 4, num_outputs=3, **due_in(30.0))
    h.run()
    assert [h.outcomes[first + index].failed.reason for index in range(3)] == ["DEADLINE_UNREACHABLE"] * 3  # type: ignore[union-attr]
    assert h.idle()


def test_requests_ahead_in_the_queue_cause_no_refusal() -> None:
    """How long others take is bounded from below by nothing: they may leave at once."""
    h = measured(Harness(Setting(max_num_batched_tokens=32, max_num_seqs=1)), 0.001)
    handles = [h.add([number, 1, 2], 3, **due_in(30.0)) for number in range(20)]
    assert [fate(h, handle) for handle in handles] == ["FINISHED"] * 20


def test_a_passed_deadline_is_reported_as_passed() -> None:
    h = measured(Harness(SETTING))
    assert fate(h, h.add(PROMPT, 4, **due_in(-1.0))) == "DEADLINE_PASSED"
    with pytest.raises(DeadlineUnreachable):
        check_deadline(2.0, 2.5)
    check_deadline(3.0, 2.5)


def test_a_deadline_that_passes_during_a_step_drops_its_ids() -> None:
    h = Harness(SETTING)
    handle = h.add([1, 2, 3], 1, **due_in(0.02))
    launch = h.runner.submit

    def slowly(batch):  # type: ignore[no-untyped-def]
        time.sleep(0.05)
        return launch(batch)

    h.runner.submit = slowly  # type: ignore[method-assign]
    assert fate(h, handle) == "DEADLINE_PASSED"
    assert h.outcomes[handle].ids == [] and h.idle()


def test_a_step_takes_at_least_what_the_fastest_of_its_size_or_of_a_smaller_one_took() -> None:
    times = StepTimeEstimator()
    for duration_s in (2.0, 1.0, 1.6):
        assert times.least_s(100) == 0.0
        times.stepped(64, duration_s)
    # 64 to 127 tokens may have taken as long.
    assert (times.least_s(63), times.least_s(64), times.least_s(96)) == (0.0, 0.5, 0.75)
    assert times.least_s(128) == times.least_s(10**6) == 1.0
    times.stepped(64, 0.0)
    assert times.least_s(64) == 0.5
