"""Random schedules: ids equal those of a request alone, block counts add up, and nothing remains."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.sequence import Sequence, Status
from photon_grpc.engine.scheduler.step_frame_builder import StepFrameBuilder
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting, windows
from tests.examples import examples

settings_of = st.builds(
    Setting,
    num_blocks=st.integers(18, 60),
    block_size=st.sampled_from([2, 3, 4, 8]),
    max_num_seqs=st.integers(1, 9),
    max_num_batched_tokens=st.integers(1, 70),
    chunked=st.booleans(),
    prefix_caching=st.booleans(),
    contiguous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "deadline", "static"]),
    fair=st.booleans(),
    depth=st.integers(0, 2),
    windows=windows,
)
prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    # Equal beginnings, so that prefixes are hit, shared and published twice.
    st.integers(1, 20).map(lambda n: list(range(n))),
)
requests = st.lists(
    st.tuples(prompts, st.integers(1, 14), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=14
)
#: Between two additions: steps to take, and whom to abort (or nobody).
events = st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 13)), min_size=14, max_size=14)


@given(settings_of, requests, events)
@settings(max_examples=examples(250))
def test_output_equals_the_request_alone_under_any_setting_order_and_abort(setting: Setting, asked, happenings) -> None:  # type: ignore[no-untyped-def]
    h = Harness(setting)
    handles: list[int] = []
    aborted: set[int] = set()
    for (prompt, max_tokens, num_outputs, priority), (steps, victim) in zip(asked, happenings, strict=False):
        handles.append(h.add(prompt, max_tokens, num_outputs=num_outputs, seed=3, priority=priority))
        for _ in range(steps):
            if h.post.inbox or h.scheduler.live.has_work():
                h.step()
        if victim is not None and victim < len(handles):
            outputs = asked[victim][2]
            h.abort(*range(handles[victim], handles[victim] + outputs))
            aborted |= set(range(handles[victim], handles[victim] + outputs))
    h.run()
    assert h.idle()
    for handle, (prompt, max_tokens, num_outputs, _) in zip(handles, asked, strict=False):
        for index in range(num_outputs):
            expected = complete(prompt, max_tokens, seed=3, index=index)
            outcome = h.outcomes[handle + index]
            assert outcome.failed is None
            if outcome.finished is not None:
                assert outcome.ids == expected and outcome.finished.num_generated == max_tokens
            else:
                assert handle + index in aborted
                assert outcome.ids == expected[: len(outcome.ids)]
    h.pool.reset_prefixes()
    h.pool.check()
    assert h.pool.num_free == h.pool.num_blocks
    assert not len(h.pool._index)


@given(settings_of, requests, st.dictionaries(st.integers(1, 30), st.integers(0, 6), max_size=4))
@settings(max_examples=examples(120))
def test_failed_steps_never_poison_those_that_come_after(setting: Setting, asked, bad_steps) -> None:  # type: ignore[no-untyped-def]
    h = Harness(setting)
    h.runner.fail_steps = bad_steps
    handles = [h.add(prompt, max_tokens, num_outputs=n, seed=3) for prompt, max_tokens, n, _ in asked]
    h.run()
    again = [h.add(prompt, max_tokens, num_outputs=n, seed=3) for prompt, max_tokens, n, _ in asked]
    h.runner.fail_steps = {}
    h.run()
    assert h.idle()
    for first, second, (prompt, max_tokens, n, _) in zip(handles, again, asked, strict=True):
        for index in range(n):
            expected = complete(prompt, max_tokens, seed=3, index=index)
            assert h.outcomes[second + index].ids == expected
            delivered = h.outcomes[first + index]
            assert delivered.ids == (expected if delivered.finished else expected[: len(delivered.ids)])


@dataclass(eq=False)
class Life:
    """Steps in which a sequence arrived, first had a slot, and ended."""

    came: int
    admitted: int = 0
    ended: int = 0


def lives_of(h: Harness, asked: list[Any], pauses: list[int]) -> list[Life]:
    """Step until all have ended; each request arrives `pauses` steps after the one before."""
    lives: dict[Sequence, Life] = {}
    step, due, add = 0, 0, h.scheduler.live.add

    def added(seqs: list[Sequence], report: StepFrameBuilder) -> None:
        lives.update((seq, Life(step)) for seq in seqs)
        add(seqs, report)

    h.scheduler.live.add = added  # type: ignore[method-assign]
    waiting = deque(zip(asked, pauses, strict=False))
    while waiting or h.scheduler.live.has_work() or h.engine._launched:
        step += 1
        while waiting and due <= step:
            (prompt, max_tokens, num_outputs, _), pause = waiting.popleft()
            h.add(prompt, max_tokens, num_outputs=num_outputs, seed=3)
            due += pause
        if h.post.inbox or h.scheduler.live.has_work() or h.engine._launched:
            h.step()
        for seq, life in lives.items():
            life.admitted = life.admitted or (step if seq.first_scheduled_s is not None else 0)
            life.ended = life.ended or (step if seq.status is Status.FINISHED else 0)
    return list(lives.values())


@given(settings_of, requests, st.lists(st.integers(0, 6), min_size=14, max_size=14))
@settings(max_examples=examples(150))
def test_static_seats_nobody_new_before_all_that_were_there_have_ended(setting: Setting, asked, pauses) -> None:  # type: ignore[no-untyped-def]
    lives = lives_of(Harness(replace(setting, policy="static")), asked, pauses)
    batch: list[Life] = []
    for life in sorted(lives, key=lambda life: life.admitted):
        if life not in batch:
            assert all(member.ended < life.admitted for member in batch)
            batch = [other for other in lives if other.came <= life.admitted <= other.admitted]
