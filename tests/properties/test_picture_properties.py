"""Whatever runs and however often pictures are sent: together they show all that was computed, and every stay."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.engine_picture import MAX_LANES_PER_SLOT, MAX_STEPS, EnginePicture, Lane, Mark
from photon_grpc.core.frames import Abort, Watch
from photon_grpc.engine import pictures
from tests.engine.harness import Harness, Setting, windows
from tests.examples import examples

settings_of = st.builds(
    Setting,
    num_blocks=st.integers(12, 20),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(2, 30),
    prefix_caching=st.booleans(),
    depth=st.integers(0, 2),
    drafts=st.sampled_from([(0,), (0,), (2, 0)]),
    windows=windows,
)
adds = st.tuples(st.just("add"), st.integers(1, 10), st.sampled_from([1, 3, 30, 30]), st.integers(1, 3))
aborts = st.tuples(st.just("abort"), st.integers(0, 11), st.booleans())
#: What comes before each turn, and whether the turn may send a picture.
turns = st.lists(st.tuples(st.lists(st.one_of(adds, aborts), max_size=3), st.booleans()), min_size=1, max_size=30)


@given(settings_of, turns, st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_pictures_show_all_that_was_computed(setting: Setting, happenings, has_room) -> None:  # type: ignore[no-untyped-def]
    """With room for any number of lanes, none are joined."""
    harness = Harness(setting)
    if has_room:
        harness.engine._pictures._num_slots = 1000
    harness.post.put(Watch(is_on=True))
    with pytest.MonkeyPatch.context() as patch:
        for frames, may_send in happenings:
            patch.setattr(pictures, "_INTERVAL_S", 0.0 if may_send else 1e9)
            for frame in frames:
                if frame[0] == "add":
                    harness.add([frame[1]] * frame[1], frame[2], num_outputs=frame[3])
                else:
                    harness.post.put(Abort((frame[1],), by_stop_string=frame[2]))
            harness.step()
        patch.setattr(pictures, "_INTERVAL_S", 0.0)
        harness.step()
        while not harness.idle():
            harness.step()
        harness.step()
    sent = [frame for _, frame in harness.post.sent if isinstance(frame, EnginePicture)]
    assert has_room or all(len(picture.lanes) <= MAX_LANES_PER_SLOT * setting.max_num_seqs for picture in sent)
    check_work(sent, harness)
    if has_room:
        check_stays(sent, harness)


def check_work(sent: list[EnginePicture], harness: Harness) -> None:
    batches = harness.runner.batches
    computed = sum(sum(batch.counts) for batch in batches)
    assert sum(lane.prefilled + lane.decoded for picture in sent for lane in picture.lanes) == computed
    assert sum(picture.num_steps for picture in sent) == len(batches)
    for picture in sent:
        assert len(picture.steps) == min(picture.num_steps, MAX_STEPS)
        assert all(0 <= lane.slot < harness.setting.max_num_seqs for lane in picture.lanes)
        if picture.num_steps <= MAX_STEPS:
            assert sum(step.prefill_tokens for step in picture.steps) == sum(lane.prefilled for lane in picture.lanes)
            assert sum(step.decode_tokens for step in picture.steps) == sum(lane.decoded for lane in picture.lanes)


def check_stays(sent: list[EnginePicture], harness: Harness) -> None:
    """Check that every admission, preemption and end is marked once, and that lanes show their sequences."""
    admitted = [outcome for outcome in harness.outcomes.values() if outcome.failed is None]
    stays: defaultdict[int, list[Lane]] = defaultdict(list)
    for picture in sent:
        for lane in picture.lanes:
            stays[lane.sequence].append(lane)
    marks = [lane.marks for lanes in stays.values() for lane in lanes]
    num_admissions = sum(len(batch.admissions) for batch in harness.runner.batches)
    assert sum(bool(each & Mark.ADMITTED) for each in marks) == num_admissions
    assert sum(bool(each & Mark.PREEMPTED) for each in marks) == harness.scheduler.num_preemptions
    for number, lanes in stays.items():
        outcome = admitted[number - 1]  # numbered as they came
        assert lanes[0].marks & Mark.ADMITTED
        assert [bool(lane.marks & Mark.ENDED) for lane in lanes[:-1]] == [False] * (len(lanes) - 1)
        # One that was preempted may have been aborted while it waited.
        assert lanes[-1].marks & Mark.ENDED or outcome.num_preemptions
        assert lanes[-1].output_tokens == len(outcome.ids)
        if outcome.finished is not None:
            assert lanes[-1].marks & Mark.ENDED
            assert lanes[0].cached_tokens == outcome.finished.num_cached_prompt
