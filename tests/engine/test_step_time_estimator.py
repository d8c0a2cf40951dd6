"""How long the engine allows its next turn to take, told before it begins."""

from __future__ import annotations

import pytest

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.engine.scheduler.step_time_estimator import StepTimeEstimator
from tests.engine.fakes import FinishedStep
from tests.engine.harness import Harness, Setting


def test_a_loop_that_computes_nothing_has_five_seconds():
    times = StepTimeEstimator()
    assert times.allowance_s(0) == 5.0
    times.stepped(64, 100.0)
    assert times.allowance_s(0) == 5.0


def test_until_a_step_was_measured_any_has_a_minute():
    assert StepTimeEstimator().allowance_s(1) == StepTimeEstimator().allowance_s(8192) == 60.0


def test_a_step_has_ten_times_what_one_of_its_size_took_and_never_less_than_five_seconds():
    times = StepTimeEstimator()
    times.stepped(512, 2.7)
    assert times.allowance_s(600) == pytest.approx(27.0)
    times.stepped(1, 0.06)
    assert times.allowance_s(1) == 5.0


def test_a_prompt_of_2048_tokens_on_two_cores_is_not_a_hang():
    """A model of 1B: 60 ms a token, 11 s for such a prompt."""
    times = StepTimeEstimator()
    times.stepped(1, 0.06)
    assert times.allowance_s(2048) >= 10 * 11.0
    times.stepped(512, 2.7)
    assert times.allowance_s(2048) == pytest.approx(10 * 4 * 2.7)


def test_a_step_smaller_than_any_measured_takes_no_longer_than_that():
    times = StepTimeEstimator()
    times.stepped(512, 2.7)
    assert times.allowance_s(3) == pytest.approx(27.0)


def test_a_step_larger_than_any_measured_has_at_least_a_minute_and_what_the_largest_makes_likely():
    times = StepTimeEstimator()
    times.stepped(1, 0.001)
    assert times.allowance_s(8192) == pytest.approx(10 * 8.192) and times.allowance_s(64) == 60.0


def test_a_pause_in_a_step_counts_for_no_more_than_was_allowed():
    times = StepTimeEstimator()
    times.stepped(512, 0.1)
    times.stepped(512, 3600.0)
    assert times.allowance_s(512) == 50.0


def test_slow_steps_count_at_once_and_are_forgotten_slowly():
    """Steps of one size grow with their contexts: each may take ten times what the longest did lately."""
    times = StepTimeEstimator()
    times.stepped(512, 1.0)
    times.stepped(512, 9.0)
    assert times.allowance_s(512) == 90.0
    times.stepped(512, 1.0)
    assert times.allowance_s(512) > 80.0
    for _ in range(60):
        times.stepped(512, 1.0)
    assert 10.0 <= times.allowance_s(512) < 11.0


@pytest.mark.parametrize("depth", [0, 1])
def test_every_turn_announces_its_time_limit_before_it_computes(depth):
    harness = Harness(Setting(depth=depth))
    runner, beats = harness.runner, harness.post.beats
    unread: dict[int, int] = {}
    compute = runner.submit

    def submit(batch: Batch) -> FinishedStep:
        unread[batch.step] = sum(batch.counts)
        assert beats[-1][1] == sum(unread.values()), "what is computed is not what was announced"
        landed = compute(batch)

        def read() -> StepOutput:
            del unread[batch.step]
            output = landed.result()
            return StepOutput(output.step, output.ids, output.faults, 2.0)

        pending = FinishedStep(StepOutput(batch.step, ()))
        pending.result = read
        return pending

    runner.submit = submit
    harness.add(list(range(20)), max_tokens=4)
    harness.add(list(range(3)), max_tokens=6)
    turns = 0
    while not turns or harness.scheduler.live.has_work() or unread:
        harness.step()
        turns += 1
        assert len(beats) == turns + 2, "one a turn, and one behind each frame that came"
    assert beats[2] == (60.0, 23)
    assert min(beats[3 + depth :]) >= (20.0, 1)
    harness.abort(99)
    harness.step()
    assert beats[-1] == (5.0, 0)
