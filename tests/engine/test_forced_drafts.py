"""Drafts that a constraint leaves no choice about: who has them, from which one on, and how many."""

from __future__ import annotations

import pytest

from photon_grpc.core.batch import Batch
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.constraints.grammar import ConstrainedOutputs
from photon_grpc.engine.scheduler.adaptive_drafting import AdaptiveForcedDrafting
from photon_grpc.engine.scheduler.drafting import ForcedDrafting
from tests.engine.fakes import VOCAB, complete
from tests.engine.harness import Harness, Setting
from tests.engine.tables import END, Panic, Table, TableGrammars, TableMatcher
from tests.engine.test_adaptive_drafting import Simulation, free

#: Either class 0 and then only 1, 2, 3 and 1, or class 1 and then the end.
KEY = Table(({0: 1, 1: 5}, {1: 2}, {2: 3}, {3: 4}, {1: 0}, {}), frozenset({5}))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("most", [0, 2, 9])
def test_rows_are_given_what_must_follow_behind_their_steps_in_flight(depth: int, most: int) -> None:
    h = Harness(Setting(depth=depth, drafts=(3,)))
    h.scheduler.drafting = ForcedDrafting(3)
    constrained = h.add([1], 40, seed=1, table=KEY, stop=(END,), max_drafts=most)
    other = h.add([2], 12, seed=2)
    h.run()
    assert h.outcomes[constrained].ids == complete([1], 40, seed=1, table=KEY)
    assert h.outcomes[other].ids == complete([2], 12, seed=2) and h.idle()
    given = [ids for batch in h.runner.batches for _, ids in batch.given]
    # Behind class 0 the table allows one class at a time; a step in flight takes the first of them.
    parts = {(1, 2, 3, 1)[begin:end] for end in range(1, 5) for begin in range(end)}
    assert set(given) <= parts and bool(given) == bool(most)
    for batch in h.runner.batches:
        slots = {slot for slot, _ in batch.given}
        assert all(yields <= 1 or slot in slots for slot, yields in zip(batch.slots, batch.yields, strict=True))


@pytest.mark.parametrize(("most", "drafts"), [(1, 1), (2, 3), (4, 5), (5, 5), (7, 7)])
def test_a_step_is_as_wide_as_its_drafts_need(most: int, drafts: int) -> None:
    chain = Table(tuple({0: at + 1} for at in range(most + 1)) + ({},), frozenset({most + 1}))
    h = Harness(Setting(depth=0, drafts=(7,)))
    h.scheduler.drafting = ForcedDrafting(7)
    h.add([1], 40, table=chain, stop=(END,))
    h.run()
    # The prompt's step takes the first id; `most` are left behind the next one.
    second: Batch = h.runner.batches[1]
    assert second.drafts == drafts and sum(len(ids) for _, ids in second.given) == most


def test_a_matcher_that_fails_to_look_ahead_gives_nothing() -> None:
    class Blind(TableMatcher):
        def forced(self) -> tuple[int, ...]:
            raise Panic("no look-ahead")

    constraints = ConstrainedOutputs(TableGrammars({"r": KEY}), VOCAB)
    seq = Sequence(Request("r", (7,), SamplingParams(), StopParams(9), 0.0), 0, 0, 0, (0.0, 1))
    constraints.begin([seq])
    constraints.matchers[seq].walk([0])  # type: ignore[attr-defined]
    assert constraints.forced(seq) == (1, 2, 3, 1)
    constraints.matchers[seq] = Blind(KEY)
    assert constraints.forced(seq) == (1, 2, 3, 1), "it is asked once at every length"
    seq.ids.append(0)
    assert constraints.forced(seq) == ()
    constraints.forget(seq)
    assert constraints.is_empty


def test_forced_drafts_of_few_rows_do_not_make_the_steps_of_many_longer() -> None:
    def after(shares: list[float]) -> int:
        now_s = 0.0
        drafting = AdaptiveForcedDrafting((1, 3, 5, 7), clock=lambda: now_s)
        seqs = Simulation(free, shares).seqs
        slots = tuple(range(1, len(seqs) + 1))
        for step in range(600):
            k = drafting.num_drafts(len(seqs), bool)
            counts = [1 + (k if share else 0) for share in shares]
            for seq, count in zip(seqs, counts, strict=True):
                if k:
                    drafting.kept(seq, count - 1, count - 1)
            cost_s = 4e-3 * (1 + 0.1 * k)
            now_s += cost_s
            drafting.stepped(Batch(step, slots, tuple(counts), tuple(counts), drafts=k), cost_s)
        return drafting.num_drafts(len(seqs), bool)

    assert after([1.0] * 4) == 7
    assert after([1.0] + [0.0] * 31) <= 1
