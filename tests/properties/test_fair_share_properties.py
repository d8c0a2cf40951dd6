"""Fair share between owners against a model.

What each owner got is counted from what the runner computed and what callers were sent, never from the queue's numbers.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.request import OwnerLimits
from photon_grpc.engine.scheduler import fair_queue
from tests.engine.harness import Harness, Setting
from tests.examples import examples

#: Of one request.
MAX_PROMPT, MAX_TOKENS = 24, 16
BACKLOG = 12

settings_of = st.builds(
    Setting,
    num_blocks=st.integers(24, 60),
    block_size=st.sampled_from([2, 4, 8]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(4, 64),
    prefix_caching=st.booleans(),
    depth=st.integers(0, 1),
    policy=st.sampled_from(["fcfs", "priority"]),
    fair=st.just(True),
)
sizes = st.lists(st.tuples(st.integers(1, MAX_PROMPT), st.integers(1, MAX_TOKENS)), min_size=1, max_size=8)
#: Weight and, over and over, prompt and output of each request.
owners = st.lists(st.tuples(st.integers(1, 4), sizes), min_size=2, max_size=4)


@dataclass
class Books:
    """Tokens of each owner: admitted prompts without cached tokens, and ids that were sent."""

    h: Harness
    #: A request's seed stands for it in the runner, its handle in frames.
    owner_of: dict[int, str] = field(default_factory=dict)
    served: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    #: Owner -> its requests, in the order of their first admission.
    order: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_sent: int = 0
    num_read: int = 0

    def add(self, owner: str, weight: int, num_prompt: int, num_tokens: int, **more: object) -> int:
        number = len(self.owner_of)
        prompt = [(number * 7 + at) % 90 for at in range(num_prompt)]
        limits = OwnerLimits(weight=weight)
        handle = self.h.add(prompt, num_tokens, seed=number, owner=owner, limits=limits, **more)
        assert handle == number
        self.owner_of[number] = owner
        return handle

    def step(self) -> None:
        num_batches = len(self.h.runner.batches)
        self.h.step()
        for batch in list(self.h.runner.batches)[num_batches:]:
            for admission in batch.admissions:
                owner = self.owner_of[admission.sampling.seed]
                if admission.sampling.seed not in self.order[owner]:
                    self.order[owner].append(admission.sampling.seed)
                    self.served[owner] += len(admission.ids) - admission.num_computed
        for _, frame in self.h.post.sent[self.num_read :]:
            for handle in frame.handles:
                self.served[self.owner_of[handle]] += 1
        self.num_read = len(self.h.post.sent)

    def num_waiting(self) -> defaultdict[str, int]:
        waiting: defaultdict[str, int] = defaultdict(int)
        for number, owner in self.owner_of.items():
            outcome = self.h.outcomes[number]
            waiting[owner] += number not in self.order[owner] and outcome.failed is None
        return waiting


@given(settings_of, owners)
@settings(max_examples=examples(25))
def test_owners_with_requests_waiting_get_tokens_in_proportion_to_their_weights(
    setting: Setting, wants: list[tuple[int, list[tuple[int, int]]]]
) -> None:
    h = Harness(setting)
    books = Books(h)
    weights = {f"owner {number}": weight for number, (weight, _) in enumerate(wants)}
    for (owner, weight), (_, asked) in zip(weights.items(), wants, strict=True):
        for turn in range(BACKLOG):
            books.add(owner, weight, *asked[turn % len(asked)])
    prompts, outputs = zip(*(size for _, asked in wants for size in asked), strict=True)
    bound = max(prompts) + setting.max_num_seqs * max(outputs)
    while True:
        books.step()
        if not all(books.num_waiting().get(owner) for owner in weights):
            break
        for one, weight in weights.items():
            for other, others_weight in weights.items():
                # Times both weights: whole numbers, so that a share exactly at the bound compares as equal.
                ahead = books.served[one] * others_weight - books.served[other] * weight
                assert ahead <= bound * others_weight, f"{one} is ahead of {other}: {dict(books.served)}, {weights}"
    h.run()
    assert h.idle()
    for admitted in books.order.values():
        assert admitted == sorted(admitted), "within an owner, who came first is first"


@given(settings_of, sizes)
@settings(max_examples=examples(20))
def test_one_owner_is_served_in_the_order_of_the_policy_alone(setting: Setting, asked: list[tuple[int, int]]) -> None:
    """Which request runs in which step is the same; arrivals and priorities are drawn from the sizes."""

    def history(fair: bool) -> list[list[int]]:
        setting.fair = fair
        h = Harness(setting)
        books = Books(h)
        for turn in range(BACKLOG):
            num_prompt, num_tokens = asked[turn % len(asked)]
            books.add("", 1, num_prompt, num_tokens, arrival_s=100.0 + turn, priority=num_tokens % 3)
        h.run()
        return [[admission.sampling.seed for admission in batch.admissions] for batch in h.runner.batches]

    # There is enough memory without preemption, which hits the last admitted whatever its policy rank.
    setting.num_blocks = 400
    assert history(fair=True) == history(fair=False)


@given(st.integers(1, 6), st.integers(20, 60), st.integers(0, 30))
@settings(max_examples=examples(20))
def test_who_comes_beside_a_flood_is_the_next_to_be_seated(num_slots: int, flood: int, steps: int) -> None:
    h = Harness(Setting(max_num_seqs=num_slots, fair=True))
    books = Books(h)
    for _ in range(flood):
        books.add("flood", 1, 8, 8)
    for _ in range(steps):
        books.step()
    admitted = len(books.order["flood"])
    late = books.add("other", 1, 8, 8)
    while not books.order["other"]:
        books.step()
    assert len(books.order["flood"]) - admitted <= num_slots
    h.run()
    assert h.outcomes[late].finished is not None


def test_an_absence_earns_no_credit_and_an_owner_alone_gets_everything() -> None:
    h = Harness(Setting(max_num_seqs=2, fair=True))
    books = Books(h)
    for _ in range(30):
        books.add("busy", 1, 8, 8)
    while len(books.order["busy"]) < 20:
        books.step()
        assert len(h.runner.batches[-1].slots) == 2
    for _ in range(10):
        books.add("back", 1, 8, 8)
    while books.num_waiting()["busy"]:
        books.step()
    # Ten of each: what the busy one had before does not count against it.
    assert 8 <= len(books.order["back"]) <= 10


def test_a_weight_that_changes_holds_from_the_next_request_on() -> None:
    h = Harness(Setting(max_num_seqs=2, fair=True))
    books = Books(h)
    for owner in ("one", "other"):
        for _ in range(60):
            books.add(owner, 1, 8, 8)
    while len(books.order["other"]) < 10:
        books.step()
    books.add("other", 3, 8, 8)
    before = dict(books.served)
    while books.num_waiting()["other"] > 5:
        books.step()
    gained = {owner: books.served[owner] - before[owner] for owner in before}
    assert 2.5 <= gained["other"] / gained["one"] <= 3.5


@dataclass
class Come:
    """A request, once so many steps were taken since the one before."""

    num_steps: int
    owner: int
    num_prompt: int
    num_tokens: int


comings = st.lists(
    st.builds(Come, st.integers(0, 12), st.integers(0, 5), st.integers(1, MAX_PROMPT), st.integers(1, MAX_TOKENS)),
    max_size=40,
)


@given(settings_of, comings, st.lists(st.sampled_from([1, 2, 4]), min_size=6, max_size=6))
@settings(max_examples=examples(40))
def test_owners_that_are_forgotten_are_served_as_if_they_were_remembered(
    setting: Setting, comings: list[Come], weights: list[int]
) -> None:
    def history(max_owners: int) -> list[tuple[list[int], tuple[int, ...]]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fair_queue, "_LEAST_OWNERS", max_owners)
            h = Harness(setting)
            books = Books(h)
            for come in comings:
                for _ in range(come.num_steps):
                    if h.scheduler.live.has_work() or h.post.inbox:
                        h.step()
                # As its sweep does, but before every request.
                if max_owners == 1:
                    h.scheduler.live.waiting._max_owners = 1  # type: ignore[attr-defined]
                books.add(str(come.owner), weights[come.owner], come.num_prompt, come.num_tokens, arrival_s=1.0)
            h.run()
            return [([each.sampling.seed for each in batch.admissions], batch.counts) for batch in h.runner.batches]

    assert history(max_owners=1) == history(max_owners=1000)


def test_names_of_owners_are_not_kept_for_ever() -> None:
    h = Harness(Setting(max_num_seqs=4, fair=True))
    books = Books(h)
    for _ in range(40):
        books.add("busy", 1, 8, 8)
    for number in range(1000):
        books.add(f"key {number}", 1, 2, 1)
        h.step()
        if number % 20 == 0:
            books.add("busy", 1, 8, 8)
    assert len(h.scheduler.live.waiting._owners) <= 2 * fair_queue._LEAST_OWNERS  # type: ignore[attr-defined]
    h.run()
    assert all(outcome.finished for outcome in h.outcomes.values())
