"""The comparison of bits finds what differs, and says where it began."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.bits import interfaces
from benchmarks.bits.__main__ import Clock, Run, arguments, main
from benchmarks.bits.company import Company, Computed, Outcome, Scenario, StepSize
from benchmarks.bits.compare import Report, Tally, digest, first_difference, step_of
from benchmarks.bits.requests import Drawn, Limits, draw_requests, request_of
from benchmarks.bits.scenarios import ALONE, Instance
from benchmarks.engine import config_of
from photon_grpc.compose.assemble import Assembled, assemble
from photon_grpc.core.logprobs import RECORD, LogprobParams

LIMITS = Limits(4096, 300, has_grammars=True, min_output=3, max_output=8, usual_prompt=30)
ONE = LogprobParams(num_logprobs=0)


def records(*logprobs: float) -> bytes:
    return b"".join(RECORD.pack(token, logprob, 1) for token, logprob in enumerate(logprobs))


def outcome(ids: list[int], logprobs: bytes = b"", *, num_continued: int = 0) -> Outcome:
    return Outcome(0, 0, num_continued, ids, logprobs, finish="MAX_TOKENS")


def test_equal_outputs_have_no_difference_and_one_digest() -> None:
    one, other = outcome([1, 2], records(-1.0, -2.0)), outcome([1, 2], records(-1.0, -2.0))
    assert first_difference(one, other, ONE) is None
    assert digest(one) == digest(other) != digest(outcome([1, 2], records(-1.0, -2.0000002)))


def test_the_first_bit_that_differs_is_found_before_the_first_id() -> None:
    expected = outcome([1, 2, 3], records(-1.0, -2.0, -3.0))
    found = first_difference(outcome([1, 2, 4], records(-1.0, -2.0000002, -3.5)), expected, ONE)
    assert found is not None and found[:2] == ("logprob", 1) and 0 < found.delta < 1e-6
    without = first_difference(outcome([1, 2, 4]), outcome([1, 2, 3]), LogprobParams())
    assert without is not None and without[:2] == ("id", 2)
    shorter = first_difference(outcome([1, 2]), outcome([1, 2, 3]), LogprobParams())
    assert shorter is not None and shorter[:2] == ("length", 2)


def test_a_continuation_is_compared_with_the_end_of_the_output() -> None:
    expected = outcome([1, 2, 3], records(-1.0, -2.0, -3.0))
    whole = records(-1.0, -2.0, -3.0)
    assert first_difference(outcome([2, 3], whole[RECORD.size :], num_continued=1), expected, ONE) is None
    found = first_difference(outcome([2, 9], whole[RECORD.size :], num_continued=1), expected, ONE)
    assert found is not None and found[:2] == ("id", 2)


def test_the_step_of_a_token_is_the_last_that_computed_it() -> None:
    sizes = [StepSize(1, 10, 1, False), StepSize(6, 6, 0, True), StepSize(3, 40, 2, False)]
    one = Outcome(0, 0, steps=[Computed(0, 0, 10), Computed(1, 10, 1), Computed(2, 0, 11)])
    assert step_of(one, 10, 10, sizes) == "a prompt part of 9-16, 2-4 rows, computed again"
    one.steps.pop()
    assert step_of(one, 10, 10, sizes) == "a decode row, 5-8 rows, plain"
    assert step_of(one, 11, 10, sizes) == "no step here (cached or copied)"


def test_requests_are_drawn_the_same_again_with_every_option() -> None:
    many = draw_requests(400, LIMITS, seed=3)
    assert many == draw_requests(400, LIMITS, seed=3) != draw_requests(400, LIMITS, seed=4)
    drawn = {name for each in many for name in each.options}
    assert drawn >= {"top_k", "top_p", "min_p", "logit_bias", "prompt_logprobs", "num_outputs", "regex", "min_tokens"}
    assert 0.25 < sum("logprobs" not in each.options for each in many) / 400 < 0.45
    assert all(len(each.prompt) + each.options["max_tokens"] <= LIMITS.max_model_len for each in many)
    assert request_of(many[0], "a").prompt_ids == many[0].prompt


@pytest.fixture(scope="module")
def model() -> Iterator[Assembled]:
    assembled = assemble(config_of(["--device", "cpu"]), lambda *_: None)
    yield assembled
    assembled.runner.close()


def test_scenarios_preempt_share_prefixes_and_chunk(model: Assembled) -> None:
    many = [Drawn(tuple(range(first, first + 30)), {"max_tokens": 20, "temperature": 0.0}) for first in range(6)]
    asked = [(number, drawn, ()) for number, drawn in enumerate(many)]
    crowded = Scenario("crowded", kv_requests=2.5, crowded=True, prefix_caching=True, max_num_batched_tokens=24)
    company = Company(model, crowded, max_tokens=50, seed=0)
    # The newest blocks are those of the last requests.
    outcomes = [*company.run(asked, float("inf")), *company.run(asked[::-1], float("inf"))]
    company.close()
    assert len(outcomes) == 12 and all(len(each.ids) == 20 and each.finish == "MAX_TOKENS" for each in outcomes)
    assert any(each.num_preempted for each in outcomes) and any(each.num_cached for each in outcomes)
    sizes = company.recorder.sizes
    assert max(size.rows for size in sizes) > 1 and max(size.tokens for size in sizes) <= 24


def test_the_report_names_what_differs(model: Assembled) -> None:
    many = draw_requests(2, LIMITS, 5)
    company = Company(model, ALONE, max_tokens=LIMITS.max_model_len, seed=0)
    outcomes = company.run([(number, drawn, ()) for number, drawn in enumerate(many)], float("inf"))
    company.close()
    report = Report(many, {(each.index, each.output): each for each in outcomes})
    report.add(Tally("model", "same"), outcomes, company.recorder.sizes)
    assert report.num_compared == len(outcomes) and not report.num_different
    wrong = Outcome(**vars(outcomes[0]) | {"ids": [*outcomes[0].ids[:-1], -1]})
    report.add(Tally("model", "wrong"), [wrong], company.recorder.sizes)
    assert report.num_different == 1 and report.tallies[-1].kinds == {"id": 1}
    assert report.tallies[-1].positions == [len(wrong.ids) - 1]
    assert all("wrong" in table or "1" in table for table in (report.scenario_table(), report.step_table()))


def test_llm_gives_the_bits_that_the_engine_gives() -> None:
    """One caller at a time, so that every request is alone."""
    args = arguments(
        ["--shape", "demo", "--unique", "4", "--outputs", "2", "5", "--prompt", "20", "--scenario", "none"]
    )
    run = Run(args, ["--device", "cpu"], Clock(1000.0))
    run.alone(run.load(Instance("default", (), ())))
    firsts = {number: each.ids for (number, output), each in run.reference.items() if not output}
    asked = interfaces.sample(run.drawn, firsts, 4, random.Random(0), share=0.0)
    with interfaces.through_llm(["--device", "cpu"]) as send:
        outcomes = [found for one in asked for found in send(one)]
    assert len(outcomes) == len(run.reference)
    for found in outcomes:
        if run.drawn[found.index].num_outputs <= 1:
            assert digest(found) == digest(run.reference[found.index, 0])


@pytest.mark.parametrize("outputs", [("9", "3"), ("0", "3")])
def test_lengths_of_outputs_that_cannot_be_drawn_are_refused(outputs: tuple[str, str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--outputs", *outputs])


def test_too_little_time_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--shape", "demo", "--unique", "60", "--time-limit-s", "0.2", "--", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["bits", *flags])
    assert main() == 1
    assert "raise --time-limit-s" in capsys.readouterr().err


def test_a_solitary_run_that_is_cut_compares_nothing(model: Assembled) -> None:
    run = Run(arguments(["--shape", "demo", "--unique", "3"]), ["--device", "cpu"], Clock(0.0))
    run.alone(model)
    assert not run.reference
    run.clock.stop_s = float("inf")
    run._try(model, Instance("default", (), ()), ALONE)
    run._rescore(model)
    assert not run.report.num_compared
