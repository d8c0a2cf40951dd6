"""Failed steps, NaN rows, cache resets and departing clients, all at once.

No other output changes, and nothing of the failures remains in the cache.
"""

from __future__ import annotations

from itertools import cycle

from hypothesis import example, given, settings
from hypothesis import strategies as st

from photon_grpc.core.frames import Control
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting, windows
from tests.examples import examples

settings_of = st.builds(
    Setting,
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([2, 3, 4]),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 40),
    chunked=st.booleans(),
    depth=st.integers(0, 2),
    windows=windows,
    drafts=st.sampled_from([(0,), (0,), (3,), (0, 1, 5)]),
)
prompts = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(1, 12).map(lambda n: list(range(n))),
)
#: Prompt, max_tokens, num_outputs, steps taken before the next one comes, whether the cache is reset or somebody leaves
#: then.
asks = st.lists(
    st.tuples(
        prompts, st.integers(1, 10), st.integers(1, 3), st.integers(0, 4), st.sampled_from(["", "", "reset", "leave"])
    ),
    min_size=1,
    max_size=12,
)


@given(
    settings_of,
    asks,
    st.dictionaries(st.integers(1, 25), st.integers(0, 6), max_size=3),
    st.dictionaries(st.integers(1, 25), st.integers(0, 3), max_size=3),
)
@example(Setting(block_size=2, max_num_batched_tokens=1), [([0, 0, 0], 1, 1, 0, "")], {3: 0}, {1: 0})
@settings(max_examples=examples(300))
def test_faults_resets_and_departures_change_nobody_elses_output(setting, asked, bad_steps, bad_rows) -> None:  # type: ignore[no-untyped-def]
    h = Harness(setting)
    h.runner.misses = cycle((0, 0, 0, 1, 0))
    h.runner.fail_steps, h.runner.nan_rows = bad_steps, bad_rows
    handles: list[int] = []
    for prompt, max_tokens, num_outputs, steps, event in asked:
        handles.append(h.add(prompt, max_tokens, num_outputs=num_outputs, seed=3))
        for _ in range(steps):
            if h.post.inbox or h.scheduler.live.has_work():
                h.step()
        if event == "reset":
            h.post.put(Control(1, "reset_prefix_cache"))
        elif event == "leave":
            h.abort(handles[len(handles) // 2])
    h.run()
    assert h.idle()
    for handle, (prompt, max_tokens, num_outputs, *_) in zip(handles, asked, strict=True):
        for index in range(num_outputs):
            expected = complete(prompt, max_tokens, seed=3, index=index)
            outcome = h.outcomes[handle + index]
            assert outcome.ids == (expected if outcome.finished else expected[: len(outcome.ids)])
    h.runner.fail_steps, h.runner.nan_rows = {}, {}
    if bad_rows and (bad_steps or any(event == "leave" for *_, event in asked)):
        # NaN in a chunk of a prompt is seen by the first that draws from it. Who left before, or failed with a step,
        # leaves that to the next.
        healing = [h.add(prompt, 1, seed=3) for prompt, *_ in asked]
        h.run()
        failures = [h.outcomes[handle].failed for handle in healing]
        assert {failed.reason for failed in failures if failed} <= {"NUMERIC_FAILURE"}
    again = [h.add(prompt, max_tokens, num_outputs=n, seed=3) for prompt, max_tokens, n, *_ in asked]
    h.run()
    for handle, (prompt, max_tokens, n, *_) in zip(again, asked, strict=True):
        for index in range(n):
            assert h.outcomes[handle + index].ids == complete(prompt, max_tokens, seed=3, index=index)
