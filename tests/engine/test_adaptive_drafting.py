"""The number of drafts follows what steps cost and how many drafts are right; times are simulated."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from photon_grpc.core.batch import Batch
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.scheduler.adaptive_drafting import AdaptiveDrafting
from photon_grpc.engine.scheduler.drafting import FixedDrafting
from photon_grpc.engine.scheduler.step_costs import SHAPE_ROWS, DraftCost, Kind, StepCosts, rows_of_shape
from photon_grpc.runner.buckets import VERIFY_ROWS, Buckets

#: Rows and drafts of a row -> seconds of a step.
Cost = Callable[[int, int], float]


def free(rows: int, drafts: int) -> float:
    """Return a step bound by weights: tokens cost next to nothing."""
    return 4e-3 * (1 + 0.01 * drafts)


def dear(rows: int, drafts: int) -> float:
    """Return a step bound by arithmetic: every token costs."""
    return 1e-3 * rows * (1 + drafts)


def loaded(rows: int, drafts: int) -> float:
    """Return a step whose tokens cost once there are more than 64."""
    return 4e-3 + 1e-4 * max(0, rows * (1 + drafts) - 64)


def measured(rows: int, drafts: int) -> float:
    """Return about what a step of an 8B takes on an H200; without a graph above 256 tokens."""
    tokens = rows * (1 + drafts)
    return 3.75e-3 + 16e-6 * tokens + (8e-3 if drafts and tokens > 256 else 0.0)


class Simulation:
    """Rows whose drafts are right with a probability of their own; a step is planned before the one before is read."""

    def __init__(
        self, cost: Cost, shares: list[float], max_drafts: int = 1 << 16,
        step_bytes: Callable[[int], float] = lambda num_tokens: 1.0, making: DraftCost = DraftCost(),  # noqa: B008
        counts: tuple[int, ...] = (1, 3, 5, 7),
    ) -> None:  # fmt: skip
        self.now_s = 1.0
        self.drafting = AdaptiveDrafting(counts, step_bytes, making, lambda: self.now_s)
        self.cost = cost
        self.shares = shares
        self.rng = random.Random(1)
        self.request = Request("r", (1,), SamplingParams(0.0), StopParams(9), 0.0, max_drafts=max_drafts)
        #: Steps with drafts.
        self.num_drafted = 0
        self.begin()

    def begin(self) -> None:
        """Let other sequences take the places of all."""
        self.seqs = [Sequence(self.request, at, 0, 0, (0.0, at)) for at in range(len(self.shares))]
        for at, seq in enumerate(self.seqs):
            seq.slot = 1
            self.drafting.computes_prompt(seq, at + 1)

    def plan(self, seqs: list[Sequence]) -> tuple[int, list[int]]:
        """Return k of the next step, and the drafts of every row."""
        k = self.drafting.num_drafts(len(seqs), bool)
        drafts = [self.drafting.of(seq, k) for seq in seqs] if k else [0] * len(seqs)
        return (k if max(drafts) else 0), drafts

    def read(self, step: int, planned: tuple[int, list[int]], seqs: list[Sequence], shares: list[float]) -> list[int]:
        """Read a step; return the ids of every row."""
        (k, drafts), rows = planned, len(seqs)
        self.num_drafted += k > 0
        self.now_s += self.cost(rows, k) * self.rng.uniform(0.97, 1.03)
        found = []
        for seq, share, count in zip(seqs, shares, drafts, strict=True):
            right = next((at for at in range(count) if self.rng.random() >= share), count)
            if k:
                self.drafting.kept(seq, count, right)
            found.append(1 + right)
        counts = tuple(1 + count for count in drafts)
        self.drafting.stepped(Batch(step, tuple(range(1, rows + 1)), counts, counts, drafts=k), 1.0)
        return found

    def run(self, num_steps: int) -> tuple[float, float]:
        """Return ids a second, and those of plain steps."""
        rows = len(self.seqs)
        num_ids, begin_s, planned = 0, self.now_s, None
        for step in range(num_steps + 1):
            following = self.plan(self.seqs)
            if planned is not None:
                num_ids += sum(self.read(step, planned, self.seqs, self.shares))
            planned = following
        return num_ids / (self.now_s - begin_s), rows / self.cost(rows, 0)


@pytest.mark.parametrize(("share", "least"), [(0.9, 4.0), (0.7, 2.2), (0.4, 1.3)])
def test_what_pays_is_drafted(share: float, least: float) -> None:
    simulation = Simulation(free, [share])
    simulation.run(200)
    found, plain = simulation.run(2000)
    assert found > least * plain


#: A cost, the share of drafts that is right, rows: in `make test` a third of them, in which every two values meet.
SIMULATED = [
    pytest.param(cost, share, rows, marks=[pytest.mark.full] if (first + second + third) % 3 else [])
    for first, cost in enumerate((free, dear, loaded))
    for second, share in enumerate((0.0, 0.3, 0.6, 0.95))
    for third, rows in enumerate((1, 16, 64))
]


@pytest.mark.parametrize(("cost", "share", "rows"), SIMULATED)
def test_speculation_never_costs_more_than_a_little(cost: Cost, share: float, rows: int) -> None:
    simulation = Simulation(cost, [share] * rows)
    simulation.run(500)
    found, plain = simulation.run(3000)
    assert found > 0.975 * plain


def test_no_step_is_drafted_under_load_and_some_are_again_after_it() -> None:
    simulation = Simulation(loaded, [0.6])
    simulation.run(300)
    assert simulation.drafting.num_drafts(1, bool) > 0 or simulation.drafting.num_drafts(1, bool) > 0
    busy = Simulation(loaded, [0.6] * 200)
    busy.run(500)
    chosen = [busy.drafting.num_drafts(200, bool) for _ in range(200)]
    assert chosen.count(0) > 180
    found, plain = simulation.run(500)
    assert found > 1.3 * plain


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_no_phase_of_a_ramp_of_load_is_slower_than_without_drafts(share: float) -> None:
    simulation = Simulation(measured, [share] * 256)
    everyone = simulation.seqs
    for rows in [1, 64, 256, 1] * 3:
        simulation.seqs, simulation.shares = everyone[:rows], [share] * rows
        found, plain = simulation.run(512)
        assert found > 0.98 * plain, rows


def test_a_busy_machine_does_not_make_drafts_that_are_wrong_look_cheap() -> None:
    simulation = Simulation(free, [0.0] * 4)
    cost, rng = simulation.cost, random.Random(4)
    simulation.run(500)
    num_drafted, steps = 0, 4000
    for _ in range(steps // 20):
        # Other processes make all steps of a while longer.
        busy = rng.choice((1.0, 1.0, 1.6, 2.5))
        simulation.cost = lambda rows, drafts, busy=busy: busy * cost(rows, drafts)  # type: ignore[misc]
        before = simulation.num_drafted
        simulation.begin()
        simulation.run(20)
        num_drafted += simulation.num_drafted - before
    assert num_drafted < 0.03 * steps


def test_steps_that_would_be_too_long_for_a_graph_are_not_even_probed() -> None:
    simulation = Simulation(measured, [0.9] * 200)
    simulation.run(500)
    assert {simulation.drafting.num_drafts(200, bool) for _ in range(3000)} == {0}
    # 64 rows with 3 drafts are 256 tokens.
    simulation.seqs, simulation.shares = simulation.seqs[:64], [0.9] * 64
    simulation.run(500)
    assert max(simulation.drafting.num_drafts(64, bool) for _ in range(20)) == 3


def test_text_that_changes_is_noticed() -> None:
    simulation = Simulation(free, [0.0])
    simulation.run(1000)
    simulation.shares = [0.9]
    simulation.run(1500)
    found, plain = simulation.run(1500)
    assert found > 2 * plain


def test_a_row_whose_drafts_are_all_wrong_stops_drafting_beside_others() -> None:
    simulation = Simulation(free, [0.9, 0.0])
    simulation.run(400)
    good, bad = simulation.seqs
    drafts = [(simulation.drafting.of(good, 3), simulation.drafting.of(bad, 3)) for _ in range(128)]
    assert all(one == 3 for one, _ in drafts)
    assert 1 <= sum(other > 0 for _, other in drafts) <= 3


def test_a_request_bounds_its_drafts() -> None:
    simulation = Simulation(free, [0.9], max_drafts=1)
    simulation.run(100)
    assert {simulation.drafting.of(simulation.seqs[0], k) for k in (0, 1, 3, 7)} == {0, 1}


def test_no_step_drafts_beside_prompts() -> None:
    simulation = Simulation(free, [0.9])
    simulation.run(300)
    found = {(has, simulation.drafting.num_drafts(1, lambda has=has: has) > 0) for has in [True, False] * 4}  # type: ignore[misc]
    assert (True, True) not in found and (False, True) in found


def with_passes(rows: int, drafts: int) -> float:
    """Return about what a step of a 1B takes whose drafts need a pass each."""
    tokens = rows * (1 + drafts)
    return 0.72e-3 + 7e-6 * tokens + (0.15e-3 + 0.13e-3 * drafts if drafts else 0.0)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_probes_of_drafts_that_never_pay_cost_little_from_the_start(rows: int) -> None:
    simulation = Simulation(with_passes, [0.0] * rows)
    found, plain = simulation.run(256)
    assert found > 0.955 * plain
    found, plain = simulation.run(2048)
    assert found > 0.99 * plain


def test_what_one_number_of_drafts_costs_tells_about_others() -> None:
    costs = StepCosts(lambda num_tokens: 1.0, DraftCost(2e-4, 1e-4))
    for rows in (1, 64):
        costs.learn(Kind(rows, 0), 1e-3)
    # Before any is measured: tokens by arithmetic, and what making drafts is said to cost.
    assert costs.ratio(Kind(1, 3)) == pytest.approx(204 / 201 + 0.5)
    assert costs.ratio(Kind(64, 3)) == pytest.approx(456 / 264 + 0.5)
    costs.learn(Kind(1, 1), 1.6e-3)
    assert costs.ratio(Kind(1, 1)) == pytest.approx(1.6)
    assert costs.ratio(Kind(1, 3)) == pytest.approx(2.2, abs=0.01)
    assert costs.ratio(Kind(64, 1)) == pytest.approx(328 / 264 + 0.6, abs=0.01)


def test_rows_are_those_of_the_shapes_that_runners_have() -> None:
    assert SHAPE_ROWS == VERIFY_ROWS
    assert [rows_of_shape(rows) for rows in (1, 3, 33, 128, 200)] == [1, 4, 48, 128, 200]


def test_a_fixed_number_of_drafts_is_bounded_by_the_shapes_of_so_many_rows() -> None:
    drafting, buckets = FixedDrafting(7), Buckets(256, 7)
    assert [drafting.num_drafts(rows, bool) for rows in (1, 32, 33, 64, 65, 128, 129)] == [7, 7, 3, 3, 1, 1, 0]
    for rows in range(1, 129):
        k = drafting.num_drafts(rows, bool)
        batch = Batch(1, tuple(range(1, rows + 1)), (1 + k,) * rows, (1 + k,) * rows, drafts=k)
        assert buckets.shape(batch) is not None


def test_a_step_takes_the_time_between_two_reads() -> None:
    now_s = [1.0]
    costs = StepCosts(lambda num_tokens: 1.0, DraftCost(), lambda: now_s[0])
    for k, gap_s in ((0, 9.0), (0, 1.0), (0, 1.0), (1, 1.9), (1, 2.0), (1, 2.0), (0, 1.5)):
        now_s[0] += gap_s
        batch = Batch(1, (1,), (1 + k,), (1 + k,), drafts=k)
        costs.stepped(batch, Kind(1, k))
    # Steps beside those of another kind tell nothing: they share what the host did for both.
    assert costs.ratio(Kind(1, 1)) == 2.0


def sparse(tokens: int) -> float:
    """Return the bytes of a step with 128 experts of which a token takes 8, beside a tenth that all tokens read."""
    return 0.1 + 1 - (1 - 8 / 128) ** tokens


def test_what_experts_read_is_assumed_before_it_is_measured() -> None:
    of_experts, even = StepCosts(sparse, DraftCost()), StepCosts(lambda num_tokens: 1.0, DraftCost())
    for costs in (of_experts, even):
        for rows in (1, 64):
            costs.learn(Kind(rows, 0), 1e-3)
    # One row with three drafts reads 0.33 of the weights instead of 0.16; of 64 rows all experts are read in any case.
    assert of_experts.ratio(Kind(1, 3)) == pytest.approx(2.0, abs=0.1) and even.ratio(Kind(1, 3)) < 1.02
    assert of_experts.ratio(Kind(64, 3)) == pytest.approx(even.ratio(Kind(64, 3)), abs=0.02)


#: Of an H200: milliseconds of plain steps by tokens, of making drafts and of each, of a prompt token; the head's part.
H200 = {
    "8b": ({1: 3.74, 8: 3.77, 16: 3.93, 32: 4.31, 64: 4.7, 128: 6.2, 256: 8.9}, (0.15, 0.17), 0.026, 0.04),
    "1b": ({1: 0.708, 8: 0.724, 16: 0.771, 32: 0.844, 64: 0.969, 128: 1.25, 256: 1.72}, (0.25, 0.31), 0.0049, 0.1),
}


def between(known: dict[int, float], tokens: int) -> float:
    """Return what lies between the known."""
    below, above = max(each for each in known if each <= tokens), min(each for each in known if each >= tokens)
    share = (tokens - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])


def answered_s(simulation: Simulation, shape: str, streams: int, tokens: int, *, drafts: bool) -> float:
    """Return the seconds until so many streams have answers of so many tokens."""
    _, _, prompt_ms, of_head = H200[shape]
    begin_s, drafting = simulation.now_s, simulation.drafting
    for seq in simulation.seqs:
        seq.slot = 0
    simulation.seqs = seqs = [Sequence(simulation.request, at, 0, 0, (0.0, at)) for at in range(streams)]
    num_prepared = 0
    for at, seq in enumerate(seqs):
        seq.slot = 1 + at
        num_prepared += drafts and drafting.computes_prompt(seq, at + 1)
    simulation.now_s += 64e-3 * prompt_ms * (streams + of_head * num_prepared)
    drafting.num_drafts(streams, lambda: True)
    drafting.stepped(Batch(0, tuple(range(1, streams + 1)), (64,) * streams, (1,) * streams), 1.0)
    left = dict.fromkeys(seqs, tokens)
    flying: tuple[tuple[int, list[int]], list[Sequence]] | None = None
    while left or flying:
        rows = list(left)
        following = ((simulation.plan(rows) if drafts else (0, [0] * len(rows))), rows) if rows else None
        if flying is not None:
            planned, before = flying
            found = simulation.read(1, planned, before, [simulation.shares[0]] * len(before))
            for seq, count in zip(before, found, strict=True):
                left[seq] = left.get(seq, 0) - count
                if left[seq] <= 0:
                    del left[seq]
                    seq.slot = 0
        flying = following
    return simulation.now_s - begin_s


RAMPS = [
    pytest.param(shape, tokens, share, marks=[pytest.mark.full] if (first + second + third) % 3 else [])
    for first, shape in enumerate(H200)
    for second, tokens in enumerate((64, 256))
    for third, share in enumerate((0.0, 0.3, 0.7, 0.9))
]


@pytest.mark.parametrize(("shape", "tokens", "share"), RAMPS)
def test_no_phase_of_a_ramp_with_a_head_loses_more_than_two_hundredths(shape: str, tokens: int, share: float) -> None:
    known, (step_ms, draft_ms), _, _ = H200[shape]

    def cost(rows: int, drafts: int) -> float:
        if not drafts:
            return 1e-3 * between(known, rows)
        of_tokens = between(known, rows_of_shape(rows) * (1 + drafts))
        return 1e-3 * (of_tokens + step_ms + draft_ms * drafts)

    def begun() -> Simulation:
        return Simulation(cost, [share], making=DraftCost(2.5e-4, 2.5e-4, 0.03), counts=(1, 3))

    drafting, plain = begun(), begun()
    # Short answers that begin together and draft end apart, and the last of 64 decides.
    least = 0.94 if (shape, tokens, share) == ("1b", 64, 0.9) else 0.98
    # The first ramp begins cold.
    for phase, streams in enumerate((1, 64, 256, 1) * 3):
        took_s = answered_s(drafting, shape, streams, tokens, drafts=True)
        plain_s = answered_s(plain, shape, streams, tokens, drafts=False)
        assert plain_s > least * took_s, (phase, streams)
    if share == 0.9:
        assert plain_s > 1.15 * took_s
