"""Whatever one drain of the inbox holds, in whatever order: an output ends once, and the engine counts it once."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.frames import Abort, Control, StepFrame
from tests.engine.harness import Harness, Setting, windows
from tests.examples import examples

settings_of = st.builds(
    Setting,
    num_blocks=st.integers(8, 24),
    block_size=st.sampled_from([2, 4]),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(2, 30),
    policy=st.sampled_from(["fcfs", "priority", "deadline", "static"]),
    depth=st.integers(0, 1),
    max_queue_size=st.sampled_from([2, 100]),
    windows=windows,
)
#: Long ago, in a moment (the steps before take longer than that or not), or never.
instants = st.sampled_from([None, None, -1.0, 0.0005])
#: Few ids, so that attempts meet, replace one another and are aborted by name.
adds = st.tuples(
    st.just("add"),
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 3),
    st.booleans(),
    st.tuples(instants, instants, instants),
)
aborts = st.tuples(st.just("abort"), st.lists(st.integers(0, 15), min_size=1, max_size=4), st.booleans())
controls = st.tuples(st.just("control"), st.lists(st.integers(0, 3), max_size=2))
#: Drains, each of several frames.
drains = st.lists(
    st.tuples(st.lists(st.one_of(adds, aborts, controls), max_size=6), st.integers(1, 3)), min_size=1, max_size=6
)


@given(settings_of, drains)
@settings(max_examples=examples(200), deadline=None)
def test_every_output_ends_once_in_whatever_order_things_come(setting: Setting, happenings) -> None:  # type: ignore[no-untyped-def]
    h = Harness(setting)
    num_outputs: dict[int, int] = {}
    unwanted: set[int] = set()
    for frames, steps in happenings:
        for frame in frames:
            if frame[0] == "add":
                _, name, max_tokens, count, replaces, dues = frame
                now = time.monotonic()
                deadline, queue_deadline, time_limit = (None if due is None else now + due for due in dues)
                handle = h.add(
                    [name, 1, 2],
                    max_tokens,
                    num_outputs=count,
                    request_id=f"r{name}",
                    replaces=replaces,
                    deadline_s=deadline,
                    queue_deadline_s=queue_deadline,
                    time_limit_s=time_limit,
                )
                num_outputs[handle] = count
            elif frame[0] == "abort":
                h.post.put(Abort(tuple(frame[1]), by_stop_string=frame[2]))
                unwanted |= set(frame[1]) & set(h.outcomes)
            else:
                h.post.put(Control(1, "abort_requests", tuple(f"r{name}" for name in frame[1])))
        for _ in range(steps):
            if h.post.inbox or h.scheduler.live.has_work():
                h.step()
    h.run()
    assert h.idle()
    frames = [frame for _, frame in h.post.sent if isinstance(frame, StepFrame)]
    finished = Counter(end.handle for frame in frames for end in frame.finished)
    failed = Counter(end.handle for frame in frames for end in frame.failed)
    for handle in h.outcomes:
        num_ends = finished[handle] + failed[handle]
        assert num_ends == 1 or (num_ends == 0 and handle in unwanted)
    load = h.post.loads[-1]
    assert load.failed == failed.total()
    assert load.finished + load.cancelled == sum(num_outputs.values()) - load.failed
    assert load.finished >= finished.total()
    assert load.output_tokens == sum(len(outcome.ids) for outcome in h.outcomes.values())
    assert load.preemptions == sum(outcome.num_preemptions for outcome in h.outcomes.values())
