"""The engine over a runner that reads its own KV cache, against the plain function of a list of ids."""

from __future__ import annotations

import time

import pytest

from photon_grpc.core.frames import Add, Control, Reply
from photon_grpc.core.request import FinishReason, Request, SamplingParams, StopParams
from photon_grpc.engine.scheduler.scheduler import SchedulerLimits
from tests.engine.clock import Clock
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Outcome, Setting

pytestmark = pytest.mark.usefixtures("windows")

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_beside_decode_rows(depth: int) -> None:
    h = Harness(Setting(depth=depth, max_num_batched_tokens=8))
    short, long = h.add([5], 20), h.add(list(range(40)), 5)
    h.run()
    assert h.outcomes[short].ids == complete([5], 20)
    assert h.outcomes[long].ids == complete(range(40), 5)
    assert any(len(b.slots) == 2 and min(b.counts) == 1 and max(b.counts) > 1 for b in h.runner.batches)
    assert max(sum(b.counts) for b in h.runner.batches) <= 8


@DEPTHS
def test_a_pool_too_small_for_all_preempts_and_all_finish_with_equal_ids(depth: int) -> None:
    h = Harness(Setting(depth=depth, num_blocks=10, prefix_caching=False))
    handles = [h.add([i, i + 1, i + 2], 24, seed=i) for i in range(6)]
    h.run()
    assert h.scheduler.num_preemptions > 0
    for i, handle in enumerate(handles):
        assert h.outcomes[handle].ids == complete([i, i + 1, i + 2], 24, seed=i)
    assert h.idle() and h.pool.num_free == h.pool.num_blocks


@DEPTHS
def test_outputs_of_one_request_share_the_prompt_and_never_write_what_is_shared(depth: int) -> None:
    h = Harness(Setting(depth=depth))
    handle = h.add(list(range(11)), 9, num_outputs=4, seed=1)
    h.run()
    for index in range(4):
        assert h.outcomes[handle + index].ids == complete(range(11), 9, seed=1, index=index)
    assert sum(sum(b.counts) for b in h.runner.batches) < 2 * 11 + 4 * 9 + 4, "the prompt was computed more than once"
    assert [len(b.copies) for b in h.runner.batches if b.copies] == [3 * h.num_groups]
    assert h.idle()


@DEPTHS
def test_a_burst_of_equal_prompts_is_computed_once(depth: int) -> None:
    h = Harness(Setting(depth=depth, max_num_batched_tokens=256))
    handles = [h.add(list(range(33)), 4) for _ in range(6)]
    h.run()
    for handle in handles:
        assert h.outcomes[handle].ids == complete(range(33), 4)
    assert sum(h.runner.batches[0].counts) == 33 + 5
    assert [h.outcomes[handle].finished.num_cached_prompt for handle in handles] == [0, 32, 32, 32, 32, 32]


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    h = Harness()
    first = h.add([1, 2, 3], 14)
    h.run()
    history = [1, 2, 3, *h.outcomes[first].ids, 7, 8]
    second = h.add(history, 3)
    h.run()
    # 17 tokens were known of which the last was never computed: 16 are whole blocks.
    assert h.outcomes[second].finished.num_cached_prompt == 16
    assert h.outcomes[second].ids == complete(history, 3)


def test_prefixes_are_shared_only_within_salt_owner_and_without_bypass() -> None:
    h = Harness()
    h.add(list(range(20)), 2, salt="a")
    h.run()
    others = [
        h.add(list(range(20)), 2, salt="b"),
        h.add(list(range(20)), 2, salt="a", owner="o"),
        h.add(list(range(20)), 2, salt="a", bypass_prefix_cache=True),
    ]
    same = h.add(list(range(20)), 2, salt="a")
    h.run()
    assert [h.outcomes[handle].finished.num_cached_prompt for handle in [*others, same]] == [0, 0, 0, 16]


def test_a_reset_forgets_every_prefix() -> None:
    h = Harness()
    h.add(list(range(20)), 2)
    h.run()
    assert h.pool.num_cached == 5 * h.num_groups
    h.post.put(Control(1, "reset_prefix_cache"))
    h.step()
    assert (0, Reply(1, 5 * h.num_groups)) in h.post.sent
    assert h.pool.num_free == h.pool.num_blocks


@DEPTHS
def test_an_aborted_request_leaves_nothing_behind(depth: int) -> None:
    h = Harness(Setting(depth=depth))
    gone, stays = h.add([1, 2, 3, 4, 5], 50), h.add([9], 10)
    for _ in range(4):
        h.step()
    h.abort(gone)
    h.step()
    assert h.engine._admission.find(0, gone) is None
    h.run()
    assert h.outcomes[stays].ids == complete([9], 10)
    assert h.outcomes[gone].finished is None and h.idle()


def test_overlap_computes_one_token_past_the_end_and_never_delivers_it() -> None:
    h = Harness(Setting(depth=1))
    expected = complete([4, 4], 30)
    stop = expected[6]
    end = expected.index(stop)
    handle = h.add([4, 4], 30, stop=(stop,))
    h.run()
    assert h.outcomes[handle].ids == expected[: end + 1]
    assert h.outcomes[handle].finished.reason is FinishReason.STOP_TOKEN
    assert h.engine.stats.load(h.scheduler).overrun_tokens == 1


def test_max_tokens_wastes_no_row() -> None:
    for depth in (0, 1):
        h = Harness(Setting(depth=depth))
        h.add([1, 2], 6)
        h.run()
        assert sum(sum(b.counts) for b in h.runner.batches) == 7


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_below_the_number_of_sequences_serves_all(budget: int) -> None:
    h = Harness(Setting(max_num_batched_tokens=budget))
    handles = [h.add([i], 12, seed=i) for i in range(6)]
    h.run()
    for i, handle in enumerate(handles):
        assert h.outcomes[handle].ids == complete([i], 12, seed=i)


def test_running_sequences_take_turns_when_the_budget_is_short() -> None:
    h = Harness(Setting(max_num_batched_tokens=4, num_blocks=400))
    handles = [h.add([i], 200, seed=i) for i in range(4)]
    h.step()
    h.scheduler.limits = SchedulerLimits(8, 3)
    for _ in range(100):
        h.step()
    lengths = [len(h.outcomes[handle].ids) for handle in handles]
    assert max(lengths) - min(lengths) <= 1


def test_without_chunking_a_prompt_over_the_budget_is_computed_in_one_step() -> None:
    h = Harness(Setting(max_num_batched_tokens=8, chunked=False))
    a, b = h.add(list(range(30)), 3), h.add(list(range(5)), 3)
    h.run()
    assert any(30 in batch.counts for batch in h.runner.batches)
    assert h.outcomes[a].ids == complete(range(30), 3) and h.outcomes[b].ids == complete(range(5), 3)


def test_requests_that_can_never_fit_are_refused_with_both_numbers() -> None:
    h = Harness(Setting(num_blocks=4, max_model_len=64))
    too_long, too_big = h.add(list(range(60)), 10), h.add(list(range(10)), 10)
    exact = h.add(list(range(10)), 7)
    h.run()
    assert (
        h.outcomes[too_long].failed.reason,
        h.outcomes[too_long].failed.needed,
        h.outcomes[too_long].failed.limit,
    ) == ("PROMPT_TOO_LONG", 70, 64)
    assert (h.outcomes[too_big].failed.reason, h.outcomes[too_big].failed.needed, h.outcomes[too_big].failed.limit) == (
        "KV_CAPACITY",
        5 * h.num_groups,
        4 * h.num_groups,
    )
    assert h.outcomes[exact].ids == complete(range(10), 7)


def test_the_queue_is_bounded_and_ids_are_unique_per_owner() -> None:
    h = Harness(Setting(max_queue_size=2))
    first = h.add([1], 5, request_id="x")
    h.step()
    twice, other = h.add([1], 5, request_id="x"), h.add([1], 5, request_id="x", owner="other")
    h.step()
    assert h.outcomes[twice].failed.reason == "DUPLICATE_REQUEST_ID"
    handles = [h.add([1], 5) for _ in range(4)]
    h.run()
    assert [h.outcomes[handle].failed.reason for handle in handles[2:]] == ["QUEUE_FULL", "QUEUE_FULL"]
    assert h.outcomes[handles[3]].failed.retry_after_s > 0
    assert h.outcomes[first].ids == h.outcomes[other].ids == complete([1], 5)


def test_a_retried_call_replaces_its_earlier_attempt() -> None:
    h = Harness()
    first = h.add([1], 50, request_id="x")
    h.step()
    second = h.add([1], 50, request_id="x", replaces=True)
    h.run()
    assert h.outcomes[first].failed.reason == "DUPLICATE_REQUEST_ID"
    assert h.outcomes[second].ids == complete([1], 50)


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [2]},
        {"max_tokens": 5},
        {"seed": 1},
        {"num_outputs": 2},
        {"stop": (3,)},
        {"priority": 1},
        {"salt": "s"},
    ]
    + [{"adapter": 1}, {"bypass_prefix_cache": True}, {"is_seed_random": True}],
)
def test_a_different_request_under_an_id_in_flight_is_refused(other: dict) -> None:
    h = Harness()
    first = h.add([1], 50, request_id="x")
    h.step()
    second = h.add(**{"prompt": [1], "max_tokens": 50} | other, request_id="x", replaces=True)
    h.run()
    assert h.outcomes[second].failed.reason == "DUPLICATE_REQUEST_ID"
    assert h.outcomes[first].ids == complete([1], 50)


def test_attempts_differ_in_their_times_and_in_a_seed_that_was_drawn() -> None:
    h = Harness()
    now = time.monotonic()
    first = h.add([1], 50, request_id="x", seed=3, is_seed_random=True, deadline_s=now + 60)
    h.step()
    times = {"deadline_s": now + 59, "queue_deadline_s": now + 50, "time_limit_s": now + 40}
    second = h.add([1], 50, request_id="x", seed=4, is_seed_random=True, replaces=True, **times)
    h.run()
    assert h.outcomes[first].failed.reason == "DUPLICATE_REQUEST_ID"
    assert h.outcomes[second].ids == complete([1], 50, seed=4)


def test_another_owner_s_request_of_the_same_id_is_out_of_reach() -> None:
    h = Harness()
    first = h.add([1], 50, request_id="x", owner="a")
    h.step()
    second = h.add([1], 50, request_id="x", owner="b", replaces=True)
    h.run()
    assert h.outcomes[first].ids == h.outcomes[second].ids == complete([1], 50)


def test_a_retry_that_is_refused_leaves_its_earlier_attempt_alone() -> None:
    h = Harness(Setting(max_queue_size=1, max_num_seqs=1))
    first = h.add([1], 30, request_id="x")
    h.step()
    h.add([2], 3)
    second = h.add([1], 30, request_id="x", replaces=True)
    h.run()
    assert h.outcomes[second].failed.reason == "QUEUE_FULL"
    assert h.outcomes[first].ids == complete([1], 30)


def test_a_request_that_may_not_wait_runs_if_a_slot_is_free() -> None:
    h = Harness(Setting(max_num_seqs=1))
    now = time.monotonic()
    first = h.add([1], 5, queue_deadline_s=now)
    second = h.add([2], 5, queue_deadline_s=now)
    h.run()
    assert h.outcomes[first].ids == complete([1], 5)
    assert h.outcomes[second].failed.reason == "QUEUE_TIMEOUT" and h.idle()


def test_deadlines_time_limits_and_queue_limits(clock: Clock) -> None:
    h = Harness(Setting(max_num_seqs=1))
    now = time.monotonic()
    limited = h.add([1], 200, time_limit_s=now + 50)
    late = h.add([2], 200, deadline_s=now + 20)
    impatient = h.add([3], 5, queue_deadline_s=now + 30)
    h.step()
    clock.skip(60)
    h.run()
    assert h.outcomes[limited].finished.reason is FinishReason.TIME_LIMIT and h.outcomes[limited].ids
    assert h.outcomes[late].failed.reason == "DEADLINE_PASSED"
    assert h.outcomes[impatient].failed.reason == "QUEUE_TIMEOUT"
    assert h.idle()


def test_policies_choose_who_is_next() -> None:
    def order(policy: str) -> list[int]:
        h = Harness(Setting(max_num_seqs=1, policy=policy))
        handles = [
            h.add([1], 3, arrival_s=100.0, deadline_s=1e9 + 3),
            h.add([2], 3, arrival_s=101.0, priority=2, deadline_s=1e9 + 2),
            h.add([3], 3, arrival_s=102.0, priority=2, deadline_s=1e9 + 1),
        ]
        h.run()
        done = [f.handle for _, frame in h.post.sent for f in frame.finished]
        return [handles.index(handle) for handle in done]

    assert order("fcfs") == [0, 1, 2]
    assert order("priority") == [1, 2, 0]
    assert order("deadline") == [2, 1, 0]


def test_waiting_raises_priority() -> None:
    h = Harness(Setting(max_num_seqs=1))
    old, young = h.add([1], 3, arrival_s=100.0), h.add([2], 3, arrival_s=161.0, priority=2)
    h.run()
    done = [f.handle for _, frame in h.post.sent for f in frame.finished]
    assert done == [old, young]


def test_static_batching_admits_nobody_until_the_batch_is_done() -> None:
    h = Harness(Setting(policy="static"))
    first = [h.add([i], 4 + 4 * i) for i in range(3)]
    h.step()
    late = h.add([9], 3)
    while h.outcomes[first[-1]].finished is None:
        assert not h.outcomes[late].ids
        h.step()
    h.run()
    assert h.outcomes[late].ids == complete([9], 3)


@DEPTHS
def test_static_batching_runs_the_outputs_of_one_request_in_one_batch(depth: int) -> None:
    h = Harness(Setting(policy="static", depth=depth))
    handle = h.add(list(range(9)), 6, num_outputs=4)
    h.step()
    late = [h.add([9], 3), h.add([8], 3)]
    h.run()
    assert max(len(batch.slots) for batch in h.runner.batches) == 4
    for index in range(4):
        assert h.outcomes[handle + index].ids == complete(range(9), 6, index=index)
    done = [f.handle for _, frame in h.post.sent for f in frame.finished]
    assert sorted(done[:4]) == [handle + index for index in range(4)] and sorted(done[4:]) == late


def test_contiguous_layout_holds_each_context_in_one_run() -> None:
    h = Harness(Setting(contiguous=True, num_blocks=20))
    handles = [h.add([i] * 6, 13, seed=i) for i in range(7)]
    h.run()
    for batch in h.runner.batches:
        assert not batch.grown
        for admission in batch.admissions:
            blocks = admission.blocks[0]
            assert list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))
    for i, handle in enumerate(handles):
        assert h.outcomes[handle].ids == complete([i] * 6, 13, seed=i)


@DEPTHS
def test_a_failed_step_fails_its_rows_and_their_dependents_only(depth: int) -> None:
    h = Harness(Setting(depth=depth))
    before = h.add([1, 2], 20)
    h.step()
    h.runner.fail_steps[2] = 9
    victims = [h.add(list(range(30)), 4)]
    h.step()
    victims.append(h.add(list(range(30)), 4))
    h.run()
    assert h.outcomes[before].failed.reason == h.outcomes[victims[0]].failed.reason == "INTERNAL_FAILURE"
    if h.outcomes[victims[1]].failed is None:
        assert h.outcomes[victims[1]].ids == complete(range(30), 4)
    after = h.add(list(range(30)), 4)
    h.run()
    assert h.outcomes[after].ids == complete(range(30), 4) and h.idle()


def test_an_operator_ends_requests() -> None:
    h = Harness(Setting(max_num_seqs=1))
    running, waiting = h.add([1], 50, request_id="a"), h.add([2], 50, request_id="b")
    h.step()
    h.step()
    h.post.put(Control(7, "abort_requests"))
    h.run()
    assert h.outcomes[running].finished.reason is FinishReason.ABORTED
    assert h.outcomes[waiting].failed.reason == "ABORTED_BY_ADMIN"
    assert (0, Reply(7, names=("a", "b"))) in h.post.sent and h.idle()


def test_nothing_to_do_sleeps_until_news_or_the_next_deadline() -> None:
    h = Harness(Setting(max_num_seqs=1))
    h.run()
    assert h.post.waits[-1] is None


def test_outputs_are_not_copied_from_a_prompt_that_the_same_step_writes() -> None:
    # In one step the second output of the third request computes [2, 3], a resumed leader hits that block, and its
    # sibling may be admitted.
    h = Harness(Setting(16, 2, max_num_seqs=4, max_num_batched_tokens=22, chunked=False, windows=(0,)))
    asked = [([0] * 12, 4, 3), ([0, 0], 5, 1), ([0, 1, 2, 3], 1, 2), ([0, 1, 2, 3], 4, 2)]
    handles = [h.add(prompt, max_tokens, num_outputs=n, seed=3) for prompt, max_tokens, n in asked]
    h.run()
    assert h.scheduler.num_preemptions > 0
    for handle, (prompt, max_tokens, n) in zip(handles, asked, strict=True):
        for index in range(n):
            assert h.outcomes[handle + index].ids == complete(prompt, max_tokens, seed=3, index=index)


def test_a_chunk_with_nan_is_not_reused_by_the_prefix_cache() -> None:
    h = Harness(Setting(max_num_batched_tokens=8))
    h.runner.nan_rows[1] = 0
    broken = h.add(list(range(20)), 4)
    h.run()
    assert h.outcomes[broken].failed.reason == "NUMERIC_FAILURE"
    sound = h.add(list(range(20)), 4)
    h.run()
    assert h.outcomes[sound].ids == complete(range(20), 4)


def test_a_chunk_launched_after_a_failed_one_is_not_reused() -> None:
    # The block of positions 2 and 3 is published by the step that writes 3; the one before, which was to write 2,
    # fails.
    h = Harness(Setting(depth=1, block_size=2, max_num_batched_tokens=1))
    h.runner.fail_steps[3] = 9
    failed = h.add([5] * 6, 2)
    h.run()
    assert h.outcomes[failed].failed.reason == "INTERNAL_FAILURE"
    again = h.add([5] * 6, 2)
    h.run()
    assert h.outcomes[again].ids == complete([5] * 6, 2)


def test_a_block_published_behind_a_step_that_fails_is_forgotten_before_the_step_that_published_it_is_read() -> None:
    """The first step writes half a block, the second the other half; whoever comes between hits nothing of it."""
    h = Harness(Setting(depth=1, block_size=4, max_num_batched_tokens=2))
    h.runner.fail_steps[1] = 0
    failed = h.add([5] * 8, 2)
    h.step()
    h.step()
    assert h.outcomes[failed].failed.reason == "INTERNAL_FAILURE" and h.scheduler._flying
    between = h.add([5] * 8, 2)
    h.run()
    assert h.outcomes[between].ids == complete([5] * 8, 2)


@pytest.mark.parametrize("windows", [(0, 4), (4,)], indirect=True)
def test_a_drawn_id_is_not_published_before_it_is_computed() -> None:
    """A block leaves the window when the last id of the next one is drawn and not computed."""
    h = Harness(Setting(block_size=4))
    prompt = [1, 2, 3, 4, 5, 6, 7]
    ids = complete(prompt, 3)
    gone = h.add(prompt, 3)
    h.step()
    assert h.outcomes[gone].ids == ids[:1]
    h.abort(gone)
    again = h.add([*prompt, ids[0], 9], 3)
    h.run()
    assert h.outcomes[again].ids == complete([*prompt, ids[0], 9], 3)
    assert h.outcomes[again].finished.num_cached_prompt == 4


@pytest.mark.parametrize(
    ("field", "prompt", "max_tokens", "num_outputs"),
    [("token_ids", (), 3, 1), ("stop.max_tokens", (1, 2), 0, 1), ("sampling.num_outputs", (1, 2), 3, 0)],
)
def test_a_request_for_nothing_is_refused(
    field: str, prompt: tuple[int, ...], max_tokens: int, num_outputs: int
) -> None:
    h = Harness()
    h.outcomes[0] = Outcome()
    request = Request("r0", prompt, SamplingParams(), StopParams(max_tokens), 0.0, num_outputs=num_outputs)
    h.post.put(Add(0, request))
    h.run()
    failed = h.outcomes[0].failed
    assert (failed.reason, failed.field, failed.needed, failed.limit) == ("INVALID_REQUEST", field, 0, 1)
    assert h.idle() and h.engine.stats.load(h.scheduler).failed == 1


def test_a_request_has_left_the_queue_when_its_first_output_runs(clock: Clock) -> None:
    h = Harness(Setting(max_num_batched_tokens=4))
    handle = h.add(list(range(20)), 3, num_outputs=2, queue_deadline_s=time.monotonic() + 20)
    h.step()
    clock.skip(30)
    h.run()
    for index in range(2):
        assert h.outcomes[handle + index].ids == complete(range(20), 3, index=index)


@DEPTHS
def test_an_output_that_runs_is_not_overdue_though_the_first_output_left_before_it_ran(
    clock: Clock, depth: int
) -> None:
    h = Harness(Setting(depth=depth))
    now = time.monotonic()
    handle = h.add([1, 2, 3], 40, num_outputs=2, queue_deadline_s=now + 20)
    h.abort(handle)
    for _ in range(4):
        h.step()
    assert h.outcomes[handle + 1].ids
    clock.skip(30)
    h.run()
    assert h.outcomes[handle + 1].ids == complete([1, 2, 3], 40, index=1)


def test_timers_of_those_who_left_before_any_token_are_dropped() -> None:
    h = Harness(Setting(max_num_batched_tokens=4))
    for _ in range(200):
        handle = h.add(list(range(20)), 3, deadline_s=time.monotonic() + 3600)
        h.step()
        h.abort(handle)
        h.step()
    assert len(h.engine._timers) < 100


def test_blocks_missing_at_rest_are_told_of_once_and_blocks_held_twice_end_the_engine(caplog) -> None:
    h = Harness()
    h.add([1, 2, 3], 4)
    h.run()
    assert not caplog.records
    lost = h.pool._free.take(1)
    h.run()
    h.run()
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith(f"1 of {h.pool.num_blocks} KV blocks are lost")
    h.pool._free.put(lost[0])
    h.pool._free.put(lost[0])
    with pytest.raises(RuntimeError, match="do not balance"):
        h.run()


def test_a_shortage_that_steps_in_flight_will_end_preempts_nobody() -> None:
    h = Harness(Setting(depth=1, block_size=2, num_blocks=4, prefix_caching=False))
    gone, stays = h.add([1, 2, 3, 4], 5), h.add([5], 6)
    h.step()
    h.step()
    assert h.pool.num_free == 0
    h.abort(gone)
    h.step()
    assert h.pool.num_limbo == 0 and h.scheduler.num_preemptions == 0, "the step in flight was read instead"
    h.run()
    assert h.outcomes[stays].ids == complete([5], 6)
    assert h.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_prompt_in_the_smallest_pool_that_holds_it_waits_for_what_its_window_frees(depth: int, drafts: int) -> None:
    """Ten blocks for all of it, and four, not ten, for a chunk of two and what its first token sees."""
    setting = Setting(
        depth=depth, block_size=4, max_num_batched_tokens=8, windows=(0, 5), drafts=(drafts,), total_blocks=14
    )
    h = Harness(setting)
    handle, larger = h.add(list(range(30)), 11), h.add(list(range(30)), 12)
    h.run(max_steps=200)
    assert h.outcomes[handle].ids == complete(range(30), 11)
    assert (h.outcomes[larger].failed.needed, h.outcomes[larger].failed.limit) == (15, 14)
    assert h.scheduler.num_preemptions == 0 and h.idle()


def test_the_best_rank_never_gives_way_and_its_prompt_is_counted_once() -> None:
    h = Harness(Setting(num_blocks=10, prefix_caching=False))
    best = h.add([0, 1, 2], 24, priority=5)
    others = [h.add([i, i + 1, i + 2], 24) for i in range(1, 5)]
    h.run()
    counts = [h.outcomes[handle].num_preemptions for handle in (best, *others)]
    assert counts[0] == 0 and sum(counts) == h.scheduler.num_preemptions > 0
    assert h.engine.stats.load(h.scheduler).prompt_tokens == 15


def test_the_queue_is_bounded_by_prompt_tokens_but_an_empty_one_takes_any() -> None:
    h = Harness(Setting(max_num_seqs=1, max_queued_tokens=10))
    h.add([1], 3)
    h.step()
    large, small = h.add(list(range(12)), 3), h.add([2], 3)
    h.run()
    assert h.outcomes[large].ids == complete(range(12), 3)
    assert h.outcomes[small].failed.reason == "QUEUE_FULL"
    assert (h.outcomes[small].failed.needed, h.outcomes[small].failed.limit) == (13, 10)


def test_a_finished_request_ignores_its_deadline(clock: Clock) -> None:
    h = Harness()
    short = h.add([1], 2, deadline_s=time.monotonic() + 50)
    h.add([2], 200)
    for _ in range(5):
        h.step()
    clock.skip(60)
    h.run()
    assert h.outcomes[short].finished is not None and h.outcomes[short].failed is None


def test_queue_time_runs_from_arrival_to_the_first_step() -> None:
    h = Harness()
    handle = h.add([1], 2, arrival_s=time.monotonic() - 5)
    h.run()
    started = [started for _, frame in h.post.sent for started in frame.started]
    assert started[0].queue_s >= 5 and h.outcomes[handle].finished.queue_s == started[0].queue_s


@pytest.mark.parametrize("num_changes", [0, 1, 2, 9], ids=["before", "one admission", "two admissions", "after"])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_behind_a_failed_step_are_faults_and_their_neighbours_are_computed(depth: int, num_changes: int) -> None:
    h = Harness(Setting(depth=depth, num_blocks=12, max_num_seqs=6, prefix_caching=False))
    # Somebody has left a table behind in every slot.
    for first in range(6):
        h.add([first] * 5, 2)
    h.run()
    failing = h.runner.batches[-1].step + 1
    h.runner.fail_steps[failing] = num_changes
    victims = [h.add([1, 2, 3, 4, 5], 6), h.add([6, 7, 8], 6)]
    h.step()
    neighbour = h.add([9, 8, 7], 6)
    h.run()
    behind = next(batch for batch in h.runner.batches if batch.step == failing + 1)
    assert len(behind.slots) == 3, "the failed step was read before the next was launched"
    assert [h.outcomes[victim].failed.reason for victim in victims] == ["INTERNAL_FAILURE"] * 2
    assert not any(h.outcomes[victim].ids for victim in victims)
    assert h.outcomes[neighbour].ids == complete([9, 8, 7], 6)
    again = h.add([1, 2, 3, 4, 5], 6)
    h.run()
    assert h.outcomes[again].ids == complete([1, 2, 3, 4, 5], 6) and h.idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_that_hit_blocks_of_a_failed_step_fails_though_it_was_preempted_since(depth: int) -> None:
    # At depth 2 the second hits in step 2 what step 1 is to fill, and gives way in step 3; then step 1 fails.
    h = Harness(Setting(num_blocks=7, block_size=2, depth=depth))
    h.runner.fail_steps = {1: 0}
    first = h.add(list(range(9)), 6, seed=3)
    h.step()
    second = h.add(list(range(6)), 5, seed=3)
    h.run()
    assert h.outcomes[first].failed.reason == "INTERNAL_FAILURE"
    assert h.outcomes[second].num_preemptions == depth - 1
    assert h.outcomes[second].failed.reason == "INTERNAL_FAILURE" and not h.outcomes[second].ids
    again = h.add(list(range(6)), 5, seed=3)
    h.run()
    assert h.outcomes[again].ids == complete(range(6), 5, seed=3)
    assert h.idle()
