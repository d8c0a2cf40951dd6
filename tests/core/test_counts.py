"""Sums over processes that come, count, tell now and then, and die: against one that counts everything."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.counts import Counts, EngineSums, Metric, Sums
from photon_grpc.core.stats import Load

CALLS = Metric("calls_total", "", ("code",), known=("OK",))
SECONDS = Metric("seconds", "", bounds=(0.5, 1.0))
NUM_PLACES = 3

events = st.one_of(
    st.tuples(st.just("count"), st.integers(0, NUM_PLACES - 1), st.sampled_from(["OK", "BAD"])),
    st.tuples(st.just("tell"), st.integers(0, NUM_PLACES - 1), st.none()),
    st.tuples(st.just("die"), st.integers(0, NUM_PLACES - 1), st.none()),
)


@given(st.lists(events, max_size=60))
def test_a_sum_includes_every_report_and_never_falls(happenings: list[tuple[str, int, str]]) -> None:
    sums, told = Sums(), Counter[str]()
    processes = [(Counts(), Counter[str]()) for _ in range(NUM_PLACES)]
    before: dict[tuple[str, ...], tuple[float, ...]] = {}
    for what, place, code in happenings:
        counts, untold = processes[place]
        if what == "count":
            counts.add(CALLS, code)
            untold[code] += 1
        elif what == "tell":
            sums.update(place, counts.changed())
            counts.acknowledge(counts.changed())
            told += untold
            untold.clear()
        else:
            sums.gone(place)
            processes[place] = (Counts(), Counter())
        found = sums.of(CALLS)
        assert {labels[0]: value for labels, (value,) in found.items() if value} == told
        assert all(found[labels] >= values for labels, values in before.items())
        before = found


def test_a_part_of_a_report_is_acknowledged_alone() -> None:
    counts = Counts()
    counts.add(CALLS, "OK")
    counts.add(CALLS, "CANCELLED")
    first, second = counts.changed()
    counts.acknowledge([first])
    assert counts.changed() == (second,)


def test_a_lost_report_is_repeated() -> None:
    counts, sums = Counts(), Sums()
    counts.add(CALLS, "OK", amount=3)
    assert counts.changed()
    counts.add(CALLS, "OK")
    sums.update(0, counts.changed())
    counts.acknowledge(counts.changed())
    assert counts.changed() == ()
    assert sums.of(CALLS) == {("OK",): (4.0,)}


def test_buckets_hold_their_upper_bound_and_all_processes() -> None:
    sums = Sums()
    for place, value in enumerate((0.5, 0.6, 7.0)):
        counts = Counts()
        counts.observe(SECONDS, value)
        sums.update(place, counts.changed())
    assert sums.of(SECONDS) == {(): (1.0, 1.0, 1.0, 8.1)}


def test_a_counter_with_known_labels_starts_at_zero() -> None:
    assert Sums().of(CALLS) == {("OK",): (0.0,)}
    assert Sums().of(SECONDS) == {(): (0.0, 0.0, 0.0, 0.0)}


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5), st.randoms())
def test_counts_survive_the_death_of_an_engine(lives: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    """Front ends tell each moment of a life in any order, and of the life before when the next has begun."""
    sums, total, seen = EngineSums(), 0, 0
    late: list[tuple[int, Load]] = []
    for life, steps in enumerate(lives):
        sums.begin(life)
        assert sums.load(life).running == 0
        moments = [(life, Load(running=1, steps=sum(steps[: n + 1]))) for n in range(len(steps))]
        cut = random.randrange(len(moments))
        news = late + moments[:cut]
        random.shuffle(news)
        late = moments[cut:]
        for each in news:
            sums.update(*each)
            assert sums.load(life).steps >= seen
            seen = sums.load(life).steps
        total += sum(steps)
    for each in late:
        sums.update(*each)
    assert sums.load(len(lives) - 1).steps == total
