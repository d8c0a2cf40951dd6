"""A deadline that cannot be met is refused on arrival, by measured rates; any other is not."""

from __future__ import annotations

import time

import pytest

from photon_grpc.core.stats import Load
from photon_grpc.engine.deadline import check_deadline, seconds_queued
from photon_grpc.engine.pace import Pace
from photon_grpc.errors import DeadlineUnreachable
from tests.engine.harness import Harness, Setting

PROMPT = list(range(80))


def measured(h: Harness, step_s: float) -> Harness:
    """Steps of any size take so long."""
    for num_tokens in (1, 2, 4, 8, 16, 32, 64):
        h.engine.pace.stepped(num_tokens, step_s)
    return h


def fate(h: Harness, handle: int) -> str:
    h.run()
    outcome = h.outcomes[handle]
    return outcome.failed.reason if outcome.failed is not None else "FINISHED"


def due_in(seconds: float) -> dict[str, float]:
    return {"deadline_s": time.monotonic() + seconds}


def test_a_prompt_that_takes_longer_than_is_left_is_refused_with_both_numbers() -> None:
    h = measured(Harness(Setting(max_num_batched_tokens=32)), 100.0)
    handle = h.add(PROMPT, 4, **due_in(150.0))
    assert fate(h, handle) == "DEADLINE_UNREACHABLE"
    failed = h.outcomes[handle].failed
    assert failed is not None and (failed.needed, failed.limit) == (300_000, pytest.approx(150_000, abs=10_000))
    assert h.idle() and not h.runner.batches


def test_with_time_enough_it_runs() -> None:
    h = measured(Harness(Setting(max_num_batched_tokens=32)), 100.0)
    assert fate(h, h.add(PROMPT, 4, **due_in(400.0))) == "FINISHED"


def test_nothing_is_refused_before_anything_was_measured() -> None:
    h = Harness(Setting(max_num_batched_tokens=32))
    assert fate(h, h.add(PROMPT, 4, **due_in(30.0))) == "FINISHED"


def test_what_the_prefix_cache_holds_takes_no_time() -> None:
    h = Harness(Setting(max_num_batched_tokens=32))
    h.add(PROMPT, 4)
    h.run()
    measured(h, 100.0)
    assert fate(h, h.add(PROMPT, 4, **due_in(150.0))) == "FINISHED"
    assert fate(h, h.add(PROMPT, 4, bypass_prefix_cache=True, **due_in(150.0))) == "DEADLINE_UNREACHABLE"


def test_every_output_of_a_refused_request_is_told() -> None:
    h = measured(Harness(Setting(max_num_batched_tokens=32)), 100.0)
    first = h.add(PROMPT, 4, num_outputs=3, **due_in(150.0))
    h.run()
    assert [h.outcomes[first + index].failed.reason for index in range(3)] == ["DEADLINE_UNREACHABLE"] * 3  # type: ignore[union-attr]
    assert h.idle()


def test_a_deadline_that_has_passed_is_told_as_passed() -> None:
    h = measured(Harness(Setting(max_num_batched_tokens=32)), 100.0)
    assert fate(h, h.add(PROMPT, 4, **due_in(-1.0))) == "DEADLINE_PASSED"


def test_those_ahead_in_the_queue_count_at_the_measured_rate() -> None:
    assert seconds_queued(10, Load(ended_per_s=4.0)) == 2.5
    assert seconds_queued(10, Load()) == 0.0
    with pytest.raises(DeadlineUnreachable):
        check_deadline(2.0, 2.5)
    check_deadline(3.0, 2.5)


def test_a_step_is_expected_to_take_what_smaller_ones_took() -> None:
    pace = Pace()
    assert pace.expected_s(100) == 0.0
    pace.stepped(64, 2.0)
    # Up to 127 tokens may have taken as long.
    assert (pace.expected_s(63), pace.expected_s(126), pace.expected_s(127), pace.expected_s(10**6)) == (0, 0, 2.0, 2.0)
    pace.stepped(64, 1.0)
    assert pace.expected_s(500) == pytest.approx(1.8)
