"""Whatever happens, in whatever order: ids equal those of a request alone, the books balance, nothing is left behind."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting

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
    depth=st.integers(0, 2),
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
@settings(max_examples=250)
def test_output_equals_the_request_alone_under_any_setting_order_and_abort(setting: Setting, asked, happenings) -> None:  # type: ignore[no-untyped-def]
    h = Harness(setting)
    handles: list[int] = []
    aborted: set[int] = set()
    for (prompt, max_tokens, num_outputs, priority), (steps, victim) in zip(asked, happenings, strict=False):
        handles.append(h.add(prompt, max_tokens, num_outputs=num_outputs, seed=3, priority=priority))
        for _ in range(steps):
            if h.post.inbox or h.scheduler.has_work():
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
    assert not len(h.pool._index) and not h.scheduler._siblings and not h.scheduler.num_in_flight


@given(settings_of, requests, st.dictionaries(st.integers(1, 30), st.integers(0, 6), max_size=4))
@settings(max_examples=120)
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
