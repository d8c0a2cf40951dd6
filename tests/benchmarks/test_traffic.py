"""The named workloads are what their definitions say, so that figures of other programs can stand beside ours."""

from __future__ import annotations

import pytest

from benchmarks import traffic, workloads
from photon_grpc.cli.load.load import Session


def prompts(sessions: list[Session]) -> list[tuple[int, ...]]:
    return [tuple(turn.prompt) for session in sessions for turn in session.turns]  # type: ignore[arg-type]


def test_ids_and_lengths_that_other_programs_were_measured_with() -> None:
    assert workloads.prompt(900, 0, 4) == (63325, 40542, 89550, 12485)
    lengths = workloads.mixed_512()
    assert (sum(n_in for n_in, _ in lengths), sum(n_out for _, n_out in lengths)) == (286_857, 136_073)


def test_closed_is_four_requests_of_128_in_each_slot() -> None:
    sessions = traffic.closed(1, 16)
    assert [len(session.turns) for session in sessions] == [4] * 16
    assert {(len(turn.prompt), turn.output_tokens) for session in sessions for turn in session.turns} == {(128, 128)}
    assert len(set(prompts(sessions))) == 64
    assert not set(prompts(sessions)) & set(prompts(traffic.closed(2, 16)))


@pytest.mark.parametrize("name", traffic.TRAFFIC)
def test_every_run_has_prompts_of_its_own_but_the_same_lengths_and_times(name: str) -> None:
    work = traffic.TRAFFIC[name]
    rate = (work.rates or (1.0,))[0]
    first, again, other = (work.make(run, rate, 0.2) for run in (1, 1, 2))
    assert first == again
    assert not set(prompts(first)) & set(prompts(other))
    assert [session.start_s for session in first] == [session.start_s for session in other]
    assert [len(prompt) for prompt in prompts(first)] == [len(prompt) for prompt in prompts(other)]
    limit = workloads.SHAPES["1b"]["max_position_embeddings"]
    assert all(len(turn.prompt) + turn.output_tokens <= limit for session in first for turn in session.turns)


@pytest.mark.parametrize(("name", "rate"), [("long", 36.0), ("chat", 120.0)])
def test_arrivals_are_poisson_at_their_rate(name: str, rate: float) -> None:
    starts = [session.start_s for session in traffic.TRAFFIC[name].make(1, rate, 1.0)]
    assert starts == sorted(starts)
    assert starts[0] > 0 and starts[-1] < traffic.ARRIVALS_S
    assert len(starts) == pytest.approx(rate * traffic.ARRIVALS_S, rel=0.1)


def test_three_of_four_long_prompts_are_long() -> None:
    lengths = [len(prompt) for prompt in prompts(traffic.long(1, 36.0, 1.0))]
    assert sum(length >= 1024 for length in lengths) / len(lengths) == pytest.approx(0.75, abs=0.05)
    assert max(lengths) <= 3072 and min(lengths) >= 64


def test_the_prefix_is_shared_and_nothing_else() -> None:
    found = prompts(traffic.prefix(1, 1.0, 1.0))
    assert len(found) == 256
    assert len({prompt[:1024] for prompt in found}) == 1
    assert len({prompt[1024:] for prompt in found}) == 256


def test_scale_changes_numbers_and_times_but_no_lengths() -> None:
    assert len(traffic.burst(1, 1.0, 1.0)) == 48
    assert traffic.burst(1, 1.0, 0.25) == traffic.burst(1, 1.0, 1.0)[:12]
    assert len(traffic.agent(1, 1.0, 0.001)) == 1
    assert traffic.staggered(1, 1.0, 0.5)[2].start_s == pytest.approx(0.2)


def test_a_smaller_vocabulary_holds_the_ids() -> None:
    sessions = traffic.within(traffic.agent(1, 1.0, 0.1), 100)
    assert max(max(prompt) for prompt in prompts(sessions)) < 100
    assert all(session.keeps_history for session in sessions)
