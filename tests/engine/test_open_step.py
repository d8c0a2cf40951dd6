"""Drafts, masks and events over the fake runner."""

from __future__ import annotations

import time
from itertools import cycle

import pytest

from photon_grpc.core.ports import Event
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidConstraint
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting
from tests.engine.tables import END, Panic, Table

pytestmark = pytest.mark.usefixtures("windows")

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])

#: Ids of class 1, then of 2, over and over; the end after any whole pair.
PAIRS = Table(({1: 1}, {2: 0}), frozenset({0}))
#: Three ids of class 3 and no more.
THREE = Table(({3: 1}, {3: 2}, {3: 3}, {}), frozenset({3}))
#: Two ids, then nothing: neither a way on nor an end.
STUCK = Table(({0: 1}, {1: 2}, {}), frozenset())


@DEPTHS
def test_drafts_that_are_all_kept_yield_k_plus_one_ids_a_step(depth: int) -> None:
    h = Harness(Setting(depth=depth, drafts=(3,)))
    handle = h.add([1, 2], 17)
    h.run()
    assert h.outcomes[handle].ids == complete([1, 2], 17)
    assert h.runner.num_kept == h.runner.num_drafts > 0
    # The prompt yields one, four steps yield four each; at a depth, steps are cut to what flights may leave.
    assert len(h.runner.batches) == 5 or depth
    assert all(y <= 1 + 3 for batch in h.runner.batches for y in batch.yields)


@DEPTHS
@pytest.mark.parametrize("misses", [(1,), (0, 1), (0, 0, 5), (40, 0, 0, 0, 0)])
def test_ids_are_those_without_drafts_whichever_are_kept(depth: int, misses: tuple[int, ...]) -> None:
    h = Harness(Setting(depth=depth, drafts=(4, 0, 2)))
    h.runner.misses = cycle(misses)
    handles = [h.add([i, i + 1], 25, seed=i) for i in range(4)]
    h.run()
    for i, handle in enumerate(handles):
        assert h.outcomes[handle].ids == complete([i, i + 1], 25, seed=i)
    assert h.runner.num_drafts > h.runner.num_kept >= 0 and h.idle()


@DEPTHS
def test_drafts_never_go_beyond_max_tokens_or_the_blocks_of_the_whole_context(depth: int) -> None:
    # 3 + 10 - 1 tokens fill three blocks, which is all there is.
    h = Harness(Setting(depth=depth, drafts=(7,), num_blocks=3, block_size=4))
    h.runner.misses = cycle((0, 0, 1))
    handle = h.add([1, 2, 3], 10)
    h.run()
    assert h.outcomes[handle].ids == complete([1, 2, 3], 10)
    assert h.scheduler.num_preemptions == 0


def test_drafts_take_no_block_from_another_sequence() -> None:
    plain, drafting = (Harness(Setting(num_blocks=8, prefix_caching=False, drafts=(k,))) for k in (0, 3))
    for h in (plain, drafting):
        h.runner.misses = cycle((1,))
        # 5 + 12 - 1 tokens each: four blocks.
        handles = [h.add([i] * 5, 12, seed=i) for i in range(2)]
        h.run()
        assert [h.outcomes[handle].ids for handle in handles] == [complete([i] * 5, 12, seed=i) for i in range(2)]
    assert drafting.scheduler.num_preemptions == plain.scheduler.num_preemptions == 0


def test_where_no_block_is_free_drafts_fill_those_that_are_held() -> None:
    h = Harness(Setting(num_blocks=3, block_size=8, prefix_caching=False, drafts=(3,)))
    handles = [h.add([i] * 5, 8, seed=i) for i in range(2)]
    h.run()
    assert [h.outcomes[handle].ids for handle in handles] == [complete([i] * 5, 8, seed=i) for i in range(2)]
    # The first takes the last block for positions 5 to 8, the second has room for 5 to 7.
    assert h.runner.batches[1].yields == (4, 3)


@DEPTHS
def test_an_end_among_kept_drafts_ends_the_output_there(depth: int) -> None:
    expected = complete([4, 4], 30)
    stop = expected[6]
    end = expected.index(stop)
    h = Harness(Setting(depth=depth, drafts=(7,)))
    handle = h.add([4, 4], 30, stop=(stop,))
    h.run()
    assert h.outcomes[handle].ids == expected[: end + 1]
    assert h.outcomes[handle].finished.reason is FinishReason.STOP_TOKEN
    load = h.engine.stats.load(h.scheduler)
    assert load.output_tokens == end + 1
    assert load.overrun_tokens == h.runner.num_kept + len(h.runner.batches) - load.output_tokens


def test_blocks_of_kept_drafts_are_found_again() -> None:
    h = Harness(Setting(drafts=(3,)))
    h.runner.misses = cycle((0, 0, 1))
    first = h.add([1, 2, 3], 14)
    h.run()
    history = [1, 2, 3, *h.outcomes[first].ids, 7, 8]
    second = h.add(history, 3)
    h.run()
    assert h.outcomes[second].finished.num_cached_prompt == 16
    assert h.outcomes[second].ids == complete(history, 3)


@DEPTHS
@pytest.mark.parametrize("drafts", [0, 3])
def test_masks_hold_an_output_to_its_table(depth: int, drafts: int) -> None:
    h = Harness(Setting(depth=depth, drafts=(drafts,)))
    h.runner.misses = cycle((0, 0, 0, 1))
    constrained, free = h.add([1], 12, seed=1, table=PAIRS, stop=(END,)), h.add([2], 12, seed=2)
    h.run()
    assert h.outcomes[constrained].ids == complete([1], 12, seed=1, stop=frozenset({END}), table=PAIRS)
    classes = [token % 4 for token in h.outcomes[constrained].ids if token != END]
    assert classes == [1, 2] * (len(classes) // 2) and len(classes) > 4
    assert h.outcomes[free].ids == complete([2], 12, seed=2)
    assert bool(h.runner.num_kept) == bool(drafts) and h.idle()


@DEPTHS
def test_an_output_after_which_only_the_end_may_come_is_complete(depth: int) -> None:
    h = Harness(Setting(depth=depth, drafts=(5,)))
    handle = h.add([1], 12, seed=1, table=THREE, stop=(END,))
    h.run()
    assert h.outcomes[handle].ids == complete([1], 12, seed=1, table=THREE)
    assert len(h.outcomes[handle].ids) == 3
    assert h.outcomes[handle].finished.reason is FinishReason.CONSTRAINT_COMPLETE and h.idle()


@DEPTHS
@pytest.mark.parametrize("drafts", [0, 3])
def test_if_no_id_is_allowed_the_request_fails_after_its_output_so_far(depth: int, drafts: int) -> None:
    h = Harness(Setting(depth=depth, drafts=(drafts,)))
    prompt = list(range(10))
    neighbour = h.add(prompt, 9, seed=2)
    stuck = h.add(prompt, 12, seed=1, table=STUCK)
    h.run()
    assert h.outcomes[stuck].failed.reason == "INVALID_CONSTRAINT"
    assert h.outcomes[stuck].ids == complete(prompt, 12, seed=1, table=STUCK) and len(h.outcomes[stuck].ids) == 2
    assert h.outcomes[neighbour].ids == complete(prompt, 9, seed=2), "its shared prompt is sound"
    again = h.add(prompt, 3)
    h.run()
    assert h.outcomes[again].finished.num_cached_prompt == 8


@DEPTHS
def test_a_prompt_with_no_allowed_next_id_stays_valid_for_other_requests(depth: int) -> None:
    h = Harness(Setting(depth=depth))
    prompt = list(range(10))
    stuck = h.add(prompt, 12, table=Table(({},), frozenset()))
    neighbour = h.add(prompt, 9)
    h.run()
    assert h.outcomes[stuck].failed.reason == "INVALID_CONSTRAINT"
    assert h.outcomes[neighbour].finished.num_cached_prompt == 8
    assert h.outcomes[neighbour].ids == complete(prompt, 9)


@DEPTHS
@pytest.mark.parametrize("num_calls", range(12))
def test_a_matcher_that_fails_ends_its_own_output_only(depth: int, num_calls: int) -> None:
    h = Harness(Setting(depth=depth, drafts=(2,)))
    h.runner.misses = cycle((0, 1))
    h.grammars.num_calls["broken"] = num_calls
    broken = h.add([1], 12, seed=1, table=PAIRS, request_id="broken")
    others = [h.add([1], 12, seed=2, table=PAIRS), h.add([1], 12, seed=3)]
    h.run()
    assert h.outcomes[broken].failed.reason == "INTERNAL_FAILURE"
    assert "matcher" not in h.outcomes[broken].failed.message
    ids = complete([1], 12, seed=1, table=PAIRS)
    assert h.outcomes[broken].ids == ids[: len(h.outcomes[broken].ids)]
    assert h.outcomes[others[0]].ids == complete([1], 12, seed=2, table=PAIRS)
    assert h.outcomes[others[1]].ids == complete([1], 12, seed=3) and h.idle()


def test_a_constraint_that_cannot_be_met_refuses_the_request_with_its_reason() -> None:
    h = Harness()
    h.grammars.broken["r0"] = InvalidConstraint("no such schema", field="constraint.json_schema")
    handle = h.add([1], 3, num_outputs=2)
    h.abort(handle)
    h.run()
    for failed in (h.outcomes[handle].failed, h.outcomes[handle + 1].failed):
        assert (failed.reason, failed.message, failed.field) == (
            "INVALID_CONSTRAINT",
            "no such schema",
            "constraint.json_schema",
        )
    load = h.post.loads[-1]
    assert (load.failed, load.cancelled) == (2, 0) and h.idle()


@DEPTHS
def test_a_request_whose_grammar_is_compiled_is_parked_until_the_event(depth: int) -> None:
    h = Harness(Setting(depth=depth))
    event = h.grammars.compiling["slow"] = Event()
    slow = h.add([1, 2], 6, num_outputs=2, seed=1, table=PAIRS, request_id="slow")
    gone = h.add([1, 2], 6, seed=1, request_id="gone", table=PAIRS)
    h.grammars.compiling["gone"] = event
    other = h.add([3], 6)
    h.run()
    assert h.outcomes[other].ids == complete([3], 6)
    assert not h.outcomes[slow].ids and h.engine.stats.load(h.scheduler).queued == 3
    assert h.post.waits[-1] is None, "the engine sleeps"
    h.abort(gone, slow)
    h.grammars.compiling.clear()
    h.post.wake(event)
    h.post.wake(event)
    h.run()
    assert h.outcomes[slow + 1].ids == complete([1, 2], 6, seed=1, index=1, table=PAIRS)
    assert not h.outcomes[slow].ids and not h.outcomes[gone].ids and h.idle()


@DEPTHS
def test_a_request_whose_grammar_comes_amid_a_static_batch_joins_the_next(depth: int) -> None:
    h = Harness(Setting(policy="static", depth=depth))
    event = h.grammars.compiling["slow"] = Event()
    slow = h.add([1], 6, num_outputs=2, seed=1, table=PAIRS, request_id="slow")
    batch = h.add([2], 12)
    h.step()
    h.grammars.compiling.clear()
    h.post.wake(event)
    while h.outcomes[batch].finished is None:
        assert not h.outcomes[slow].ids
        h.step()
    h.run()
    assert h.outcomes[batch].ids == complete([2], 12)
    for index in range(2):
        assert h.outcomes[slow + index].ids == complete([1], 6, seed=1, index=index, table=PAIRS)
    assert h.idle()


def test_parked_requests_count_as_queued_and_their_time_runs() -> None:
    h = Harness(Setting(max_queue_size=2))
    event = Event()
    names = ("a", "b", "c")
    h.grammars.compiling.update(dict.fromkeys(names, event))
    now = time.monotonic()
    late, overdue, refused = (
        h.add([1, 2], 6, table=PAIRS, request_id=name, deadline_s=deadline_s, queue_deadline_s=queue_deadline_s)
        for name, deadline_s, queue_deadline_s in zip(names, (now, None, None), (None, now, None), strict=True)
    )
    h.run()
    reasons = [h.outcomes[handle].failed.reason for handle in (late, overdue, refused)]
    assert reasons == ["DEADLINE_PASSED", "QUEUE_TIMEOUT", "QUEUE_FULL"]
    h.grammars.compiling.clear()
    h.post.wake(event)
    h.run()
    assert not any(h.outcomes[handle].ids for handle in (late, overdue)) and h.idle()


@pytest.mark.parametrize("error", [ValueError("insides"), Panic("insides")])
def test_a_grammar_that_turns_out_broken_fails_what_was_parked(error: BaseException) -> None:
    h = Harness()
    event = h.grammars.compiling["r0"] = Event()
    handle = h.add([1], 3, table=PAIRS)
    h.run()
    h.grammars.compiling.clear()
    h.grammars.broken["r0"] = error
    h.post.wake(event)
    h.abort(handle)
    h.run()
    assert h.outcomes[handle].failed.reason == "INTERNAL_FAILURE" and "insides" not in h.outcomes[handle].failed.message
    assert h.idle()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_process_wide_exceptions_are_not_mistaken_for_a_broken_constraint(error: type[BaseException]) -> None:
    h = Harness()
    h.grammars.broken["r0"] = error()
    h.add([1], 3)
    with pytest.raises(error):
        h.run()


@DEPTHS
@pytest.mark.parametrize("fails", ["body", "tail"])
def test_a_failed_step_with_drafts_and_masks_fails_its_rows_and_later_ones(depth: int, fails: str) -> None:
    h = Harness(Setting(depth=depth, drafts=(3,)))
    victims = [h.add([1, 2, 3], 20, seed=1, table=PAIRS, stop=(END,)), h.add([4, 5], 20, seed=2)]
    h.step()
    h.step()
    step = h.runner.batches[-1].step + 1
    h.runner.fail_steps.update({step: 9} if fails == "body" else {})
    h.runner.fail_tails.update({step} if fails == "tail" else ())
    h.step()
    neighbours = [h.add([7, 8, 9], 9, seed=3, table=PAIRS, stop=(END,)), h.add([6], 9, seed=4)]
    h.run()
    assert {h.outcomes[handle].failed.reason for handle in victims} == {"INTERNAL_FAILURE"}
    assert h.outcomes[neighbours[0]].ids == complete([7, 8, 9], 9, 3, stop=frozenset({END}), table=PAIRS)
    assert h.outcomes[neighbours[1]].ids == complete([6], 9, seed=4) and h.idle()
