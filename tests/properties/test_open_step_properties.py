"""Drafts, masks, log-probabilities, events, faults and departures mixed at random.

Every output is a prefix of the one that its request has alone, and all of it unless something ended it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams
from photon_grpc.core.ports import Event
from tests.engine import scored
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting, windows
from tests.engine.tables import END, NUM_CLASSES, Table
from tests.examples import examples

settings_of = st.builds(
    Setting,
    num_blocks=st.integers(18, 50),
    block_size=st.sampled_from([2, 3, 4, 8]),
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(1, 60),
    chunked=st.booleans(),
    prefix_caching=st.booleans(),
    contiguous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "deadline", "static"]),
    depth=st.integers(0, 2),
    windows=windows,
    drafts=st.lists(st.sampled_from([0, 1, 2, 3, 7]), min_size=1, max_size=4).map(tuple),
)
states = st.integers(0, 3)
tables = st.builds(
    Table,
    st.lists(
        st.dictionaries(st.integers(0, NUM_CLASSES - 1), states, max_size=NUM_CLASSES), min_size=4, max_size=4
    ).map(tuple),
    st.frozensets(states),
)
prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=16),
    # Equal beginnings, so that prefixes are hit, shared and published twice.
    st.integers(1, 16).map(lambda n: list(range(n))),
)


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    max_tokens: int
    num_outputs: int
    priority: int
    stop: frozenset[int]
    table: Table | None
    logprobs: LogprobParams
    #: Steps taken before the next one comes.
    pause: int
    #: Which of those that came leaves then.
    leaver: int | None
    #: Its grammar is compiled while this many more come.
    compiled_after: int
    #: Calls after which its matchers break.
    num_calls: int | None
    #: It continues from so many ids of its only output.
    cut: int = 0
    #: Calls after which one of its matchers after the other is lost.
    losses: tuple[int, ...] = ()
    #: Those are made again while so many more come; -1: by the next turn.
    remade_after: int = 0

    def whole(self, number: int, index: int = 0) -> list[int]:
        """Return an output as it is when the request is alone."""
        return complete(self.prompt, self.max_tokens, number, index, self.stop, self.table)

    def continued_ids(self, number: int) -> tuple[int, ...]:
        return tuple(self.whole(number)[: self.cut]) if self.num_outputs == 1 else ()


asks = st.builds(
    Ask,
    prompts,
    max_tokens=st.integers(1, 16),
    num_outputs=st.integers(1, 3),
    priority=st.integers(0, 2),
    stop=st.sampled_from([frozenset(), frozenset({END}), frozenset({END, *range(20)})]),
    table=st.none() | tables,
    logprobs=st.just(NO_LOGPROBS)
    | st.builds(
        LogprobParams,
        st.integers(-1, 2),
        st.integers(-1, 2),
        st.lists(st.integers(0, 96), max_size=2).map(tuple),
    ),
    pause=st.integers(0, 5),
    leaver=st.none() | st.none() | st.integers(0, 9),
    compiled_after=st.sampled_from([0, 0, 1, 3]),
    num_calls=st.none() | st.none() | st.integers(0, 40),
    cut=st.sampled_from([0, 0, 0, 1, 3, 16]),
    losses=st.just(()) | st.lists(st.integers(0, 12), max_size=4).map(tuple),
    remade_after=st.sampled_from([-1, -1, 0, 1, 2]),
)
#: How far a draft lies from what will be drawn; 0 is kept.
misses = st.lists(st.sampled_from([0, 0, 0, 0, 1, 50]), min_size=1, max_size=12)
steps_that_fail = st.dictionaries(st.integers(1, 25), st.integers(0, 6), max_size=2)


class Story:
    """Asks one after the other, with what happens between them, until nothing is left to do."""

    def __init__(self, setting: Setting, many: list[Ask], misses: list[int]) -> None:
        self.h = Harness(setting)
        self.h.runner.misses = cycle(misses)
        self.asks = many
        self.handles: list[int] = []
        self.left: set[int] = set()
        self._events: dict[int, Event] = {}
        self._remade: dict[int, Event] = {}

    def run(self) -> None:
        for number, ask in enumerate(self.asks):
            self._come(number, ask)
            for _ in range(ask.pause):
                if self.h.post.inbox or self.h.scheduler.live.has_work():
                    self.h.step()
            if ask.leaver is not None and ask.leaver < len(self.handles):
                first, outputs = self.handles[ask.leaver], self.asks[ask.leaver].num_outputs
                self.left.update(range(first, first + outputs))
                self.h.abort(*range(first, first + outputs))
            self._compile(number)
        self.h.run()
        for number in tuple(self._events):
            self._wake(number)
        self.h.run()
        for number in tuple(self._remade):
            self._remake(number)
        self.h.run()
        assert self.h.idle()
        assert all(each.is_cancelled or each.awaits() is None for each in self.h.grammars.preparations)
        budget = self.h.setting.max_num_batched_tokens
        assert all(sum(batch.counts) <= budget or len(batch.slots) == 1 for batch in self.h.runner.batches)

    def _come(self, number: int, ask: Ask) -> None:
        grammars, name = self.h.grammars, f"r{number}"
        if ask.num_calls is not None:
            grammars.num_calls[name] = ask.num_calls
        if ask.table is not None and ask.compiled_after:
            self._events[number] = grammars.compiling[name] = Event()
        if ask.losses:
            grammars.losses[name] = list(ask.losses)
        if ask.losses and ask.remade_after < 0:
            grammars.next_turn[name] = self.h.post.wake
        if ask.losses and ask.remade_after > 0:
            self._remade[number] = grammars.made_anew[name] = Event()
        self.handles.append(self.add(number, ask, priority=ask.priority, request_id=name))

    def add(self, number: int, ask: Ask, **more: object) -> int:
        return self.h.add(
            ask.prompt,
            ask.max_tokens,
            num_outputs=ask.num_outputs,
            seed=number,
            stop=tuple(ask.stop),
            table=ask.table,
            logprobs=ask.logprobs,
            continued_ids=ask.continued_ids(number),
            **more,
        )

    def _compile(self, now: int) -> None:
        for number in [n for n in self._events if n + self.asks[n].compiled_after <= now]:
            self._wake(number)
        for number in [n for n in self._remade if n + self.asks[n].remade_after <= now]:
            self._remake(number)

    def _remake(self, number: int) -> None:
        del self.h.grammars.made_anew[f"r{number}"]
        self.h.post.wake(self._remade.pop(number))

    def _wake(self, number: int) -> None:
        del self.h.grammars.compiling[f"r{number}"]
        self.h.post.wake(self._events.pop(number))

    def check(self, *, may_fail: bool) -> None:
        """Every output against what its request draws alone."""
        for number, (ask, handle) in enumerate(zip(self.asks, self.handles, strict=True)):
            for index in range(ask.num_outputs):
                cut = len(ask.continued_ids(number))
                self._check_one(ask, handle + index, ask.whole(number, index), cut, may_fail)
                whole = (
                    scored.of_prompt(ask.prompt, ask.logprobs) if ask.logprobs.num_prompt_records and not index else b""
                )
                assert whole.startswith(self.h.outcomes[handle + index].prompt_logprobs)

    def _check_one(self, ask: Ask, handle: int, whole: list[int], cut: int, may_fail: bool) -> None:
        outcome, expected = self.h.outcomes[handle], whole[cut:]
        assert outcome.ids == expected[: len(outcome.ids)]
        assert outcome.logprobs == scored.of_output([*ask.prompt, *whole[:cut]], outcome.ids, ask.logprobs)
        if outcome.finished is not None:
            assert outcome.ids == expected and outcome.finished.num_generated == len(expected)
        elif outcome.failed is None:
            assert handle in self.left
        elif outcome.failed.reason == "INVALID_CONSTRAINT":
            assert ask.table is not None and outcome.ids == expected and not ask.table.allowed(whole)
        else:
            assert outcome.failed.reason == "INTERNAL_FAILURE"
            assert may_fail or (ask.table is not None and ask.num_calls is not None)


@given(settings_of, st.lists(asks, min_size=1, max_size=10), misses)
@settings(max_examples=examples(300), deadline=None)
def test_drafts_and_masks_change_no_output_and_leave_nothing_behind(
    setting: Setting, many: list[Ask], misses: list[int]
) -> None:
    story = Story(setting, many, misses)
    story.run()
    story.check(may_fail=False)
    pool = story.h.pool
    pool.reset_prefixes()
    pool.check()
    assert pool.num_free == pool.num_blocks and not len(pool._index)


@given(
    settings_of,
    st.lists(asks, min_size=1, max_size=8),
    misses,
    steps_that_fail,
    st.sets(st.integers(1, 25), max_size=2),
)
@settings(max_examples=examples(200), deadline=None)
def test_steps_that_fail_change_no_output_of_those_behind_them(
    setting: Setting, many: list[Ask], misses: list[int], bodies: dict[int, int], tails: set[int]
) -> None:
    story = Story(setting, many, misses)
    story.h.runner.fail_steps, story.h.runner.fail_tails = bodies, tails
    story.run()
    story.check(may_fail=True)
    story.h.runner.fail_steps, story.h.runner.fail_tails = {}, set()
    again = [story.add(number, ask) for number, ask in enumerate(many)]
    story.h.run()
    story.handles, story.left = again, set()
    story.check(may_fail=False)
