"""Pictures of the engine: only for front ends that watch, at most ten a second, and about what happened since."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from photon_grpc.core.engine_picture import MAX_STEPS, EnginePicture, Lane, Mark
from photon_grpc.core.frames import StepFrame, Watch
from photon_grpc.engine import pictures
from tests.engine.clock import Clock
from tests.engine.harness import Harness, Setting


def watched(setting: Setting | None = None, *, frontend: int = 0) -> Harness:
    harness = Harness(setting)
    harness.post.put(Watch(is_on=True), frontend)
    return harness


def sent(harness: Harness, frontend: int = 0) -> list[EnginePicture]:
    return [frame for to, frame in harness.post.sent if to == frontend and isinstance(frame, EnginePicture)]


def run(harness: Harness) -> None:
    """Step until the engine is idle."""
    harness.step()
    while not harness.idle():
        harness.step()


def lanes(harness: Harness) -> Iterator[Lane]:
    return (lane for picture in sent(harness) for lane in picture.lanes)


@pytest.fixture
def every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_INTERVAL_S", 0.0)


@pytest.mark.usefixtures("every_turn")
def test_a_request_can_be_watched_from_admission_to_its_end() -> None:
    harness = watched(Setting(max_num_batched_tokens=6, num_blocks=16))
    harness.add(list(range(1, 11)), 3)
    harness.add([50, 51], 2)
    run(harness)
    assert [picture.lanes for picture in sent(harness)] == [
        (Lane(0, 1, 10, 0, 6, 0, 6, 0, Mark.ADMITTED),),
        (Lane(0, 1, 10, 0, 10, 1, 4, 0, 0), Lane(1, 2, 2, 0, 2, 1, 2, 0, Mark.ADMITTED)),
        (Lane(0, 1, 10, 0, 11, 2, 0, 1, 0), Lane(1, 2, 2, 0, 3, 2, 0, 1, Mark.ENDED)),
        (Lane(0, 1, 10, 0, 12, 3, 0, 1, Mark.ENDED),),
    ]
    steps = [step for picture in sent(harness) for step in picture.steps]
    assert [(step.prefill_tokens, step.decode_tokens) for step in steps] == [(6, 0), (6, 0), (0, 2), (0, 1)]
    loads = [picture.load for picture in sent(harness)]
    assert (loads[0].queued, loads[0].running, loads[-1].running, loads[-1].finished) == (1, 1, 0, 2)


@pytest.mark.usefixtures("every_turn")
def test_hits_of_the_prefix_cache_show() -> None:
    harness = watched()
    harness.add(list(range(1, 13)), 2)
    run(harness)
    harness.add(list(range(1, 13)), 2, num_outputs=2)
    run(harness)
    first, hit, fork = [lane for lane in lanes(harness) if lane.marks & Mark.ADMITTED]
    assert first.cached_tokens == 0 and hit.cached_tokens == 8 and fork.cached_tokens == 11
    assert [lane.prefilled for lane in (first, hit, fork)] == [12, 4, 1]


@pytest.mark.usefixtures("every_turn")
def test_preemptions_show_and_the_sequence_comes_back_by_the_same_number() -> None:
    harness = watched(Setting(num_blocks=7, prefix_caching=False))
    for number in range(2):
        harness.add([10 * number + 1] * 8, 10)
    run(harness)
    assert harness.scheduler.num_preemptions
    preempted = [lane for lane in lanes(harness) if lane.marks & Mark.PREEMPTED]
    assert len(preempted) == harness.scheduler.num_preemptions
    assert all(lane.computed_tokens == 0 and not lane.marks & Mark.ENDED for lane in preempted)
    victims = {lane.sequence for lane in preempted}
    for number in victims:
        marks = [lane.marks for lane in lanes(harness) if lane.sequence == number and lane.marks]
        assert marks[0] == Mark.ADMITTED and marks[-1] == Mark.ENDED
        assert marks.count(Mark.ADMITTED) == 1 + marks.count(Mark.PREEMPTED)


@pytest.mark.usefixtures("every_turn")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_who_begins_to_watch_later_sees_what_runs_already(depth: int) -> None:
    harness = Harness(Setting(depth=depth, max_num_batched_tokens=8))
    harness.add([1, 2, 3], 40)
    for _ in range(4):
        harness.step()
    harness.add([4] * 20, 40)
    for _ in range(2):
        harness.step()
    num_before = len(harness.runner.batches)
    harness.post.put(Watch(is_on=True))
    run(harness)
    first, *later = sent(harness)
    # With a step in flight, that one was read before the first picture, and it does not count.
    assert first.num_steps == (depth == 0)
    assert sum(picture.num_steps for picture in (first, *later)) == len(harness.runner.batches) - num_before
    assert [(lane.sequence, lane.marks) for lane in first.lanes] == [(1, 0), (2, 0)]
    totals = {lane.sequence: lane.computed_tokens - lane.prefilled - lane.decoded for lane in first.lanes}
    for picture in (first, *later):
        for lane in picture.lanes:
            totals[lane.sequence] += lane.prefilled + lane.decoded
            assert totals[lane.sequence] - lane.computed_tokens in range(-8 * depth, depth + 1)
    assert sum(lane.decoded for picture in later for lane in picture.lanes if lane.sequence == 1) > 30
    assert {lane.sequence for lane in lanes(harness) if lane.prefilled} == {2}


def test_without_a_watcher_nothing_is_sent_or_held() -> None:
    harness = Harness()
    harness.add([1, 2], 4)
    run(harness)
    assert not sent(harness) and not harness.engine._traces
    harness.post.put(Watch(is_on=True))
    harness.add([1, 2], 200)
    harness.step()
    assert len(sent(harness)) == 1 and harness.engine._traces
    harness.post.put(Watch(is_on=False))
    run(harness)
    assert len(sent(harness)) == 1 and not harness.engine._traces
    assert not harness.engine._pictures._lanes._stays and harness.engine._pictures.due_s() is None
    harness.post.put(Watch(is_on=False))
    harness.run()


def test_an_idle_engine_sends_one_at_once_and_then_one_a_second(clock: Clock) -> None:
    harness = watched()
    harness.step()
    (first,) = sent(harness)
    assert (first.lanes, first.steps, first.load.total_blocks) == ((), (), 64)
    clock.skip(0.5)
    harness.step()
    assert len(sent(harness)) == 1
    assert 0.0 < harness.post.waits[-1] <= 0.5  # the engine wakes for the next one
    clock.skip(0.6)
    harness.step()
    assert len(sent(harness)) == 2
    assert sent(harness)[1].time_s > first.time_s + 1


def test_ten_a_second_however_many_steps_and_watchers(clock: Clock) -> None:
    clock.stop()
    harness = watched()
    times: dict[int, list[float]] = {0: [], 1: []}
    harness.add([1, 2], 200)
    for step in range(150):
        if step in (20, 40):
            harness.post.put(Watch(is_on=True), 1)
        harness.step()
        for frontend, seen in times.items():
            seen += [clock() for _ in sent(harness, frontend)[len(seen) :]]
        clock.skip(0.011)
    for seen in times.values():
        assert all(after - before >= 0.1 for before, after in pairwise(seen))
    assert 10 <= len(times[1]) < len(times[0]) <= 16
    late = sent(harness, 1)
    assert sent(harness)[-len(late) :] == late


def test_a_picture_is_bounded_however_much_happened_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that of 200 steps the newest 64 are sent, and two lanes for a slot that 40 sequences had."""
    harness = watched(Setting(max_num_seqs=1, prefix_caching=False))
    harness.step()
    monkeypatch.setattr(pictures, "_INTERVAL_S", 1e9)
    for _ in range(40):
        harness.add([1, 2, 3], 5)
    run(harness)
    monkeypatch.setattr(pictures, "_INTERVAL_S", 0.0)
    harness.step()
    picture = sent(harness)[-1]
    assert picture.num_steps == 200 and len(picture.steps) == MAX_STEPS
    oldest, newest = picture.lanes
    assert (newest.sequence, newest.prefilled, newest.decoded) == (40, 39 * 3, 39 * 4)
    assert (oldest.sequence, oldest.prefilled, oldest.decoded) == (1, 3, 4)
    assert oldest.marks == newest.marks == Mark.ADMITTED | Mark.ENDED


def test_when_all_slots_change_hands_every_end_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = watched()
    harness.step()
    monkeypatch.setattr(pictures, "_INTERVAL_S", 1e9)
    for number in range(16):
        harness.add([number], 3)
    run(harness)
    monkeypatch.setattr(pictures, "_INTERVAL_S", 0.0)
    harness.step()
    marks = {lane.sequence: lane.marks for lane in sent(harness)[-1].lanes}
    assert marks == dict.fromkeys(range(1, 17), Mark.ADMITTED | Mark.ENDED)


def test_step_frames_are_the_same_with_and_without_watchers() -> None:
    frames = []
    for is_on in (False, True):
        harness = Harness(Setting(num_blocks=8))
        harness.post.put(Watch(is_on))
        for number in range(3):
            harness.add([number] * 5, 6, request_id=str(number), arrival_s=0.0)
        run(harness)
        # Times apart.
        frames.append(
            [
                (frame.handles, frame.ids, len(frame.finished), frame.preempted)
                for _, frame in harness.post.sent
                if isinstance(frame, StepFrame)
            ]
        )
    assert frames[0] == frames[1]
