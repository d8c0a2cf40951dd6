"""What holds bit for bit on a CPU: a request's numbers do not depend on what its neighbours hold or ask for, only on
how many tokens a step computes and how long its rows are, and not on blocks, slots or the context's limit.

Rows beside it do change its last bits there (docs/numerics.md): products of few rows add in another order than those of
many, and attention pads to the longest row. On a GPU they do not; `python -m benchmarks.bits` compares those.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bits.company import Company, Outcome, Scenario
from benchmarks.bits.compare import digest
from benchmarks.bits.requests import Drawn, Limits, draw_requests
from benchmarks.bits.scenarios import ALONE
from benchmarks.engine import config_of
from photon_grpc.compose.assemble import Assembled, assemble
from tests.examples import examples

LIMITS = Limits(vocab_size=4096, max_model_len=200, has_grammars=False, min_output=2, max_output=8, usual_prompt=24)
#: Of an engine that computes the same steps.
SETTINGS = (
    ("--block-size", "8", "--num-blocks", "400"),
    ("--block-size", "64", "--max-model-len", "512"),
    ("--max-num-seqs", "3", "--enforce-eager"),
    ("--kv-layout", "contiguous", "--max-model-len", "256", "--num-blocks", "40"),
    ("--max-num-batched-tokens", "200", "--scheduling-policy", "fcfs", "--no-enable-prefix-caching"),
    (),
)
#: Options by which the number of a request's steps could depend on what it draws, or by which it has several rows.
OF_LENGTH = ("stop_token_ids", "num_outputs", "regex")


@cache
def loaded(flags: tuple[str, ...]) -> Assembled:
    return assemble(config_of(["--device", "cpu", *flags]), lambda *_: None)


@pytest.fixture(autouse=True, scope="module")
def _models() -> Iterator[None]:
    yield
    loaded.cache_clear()


def computed(assembled: Assembled, scenario: Scenario, many: list[Drawn]) -> list[Outcome]:
    """Return the outputs in the order of the requests."""
    company = Company(assembled, scenario, max_tokens=LIMITS.max_model_len, seed=0)
    outcomes = company.run([(number, drawn, ()) for number, drawn in enumerate(many)], stop_s=float("inf"))
    company.close()
    return sorted(outcomes, key=lambda outcome: (outcome.index, outcome.output))


def drawn_requests(count: int, seed: int) -> list[Drawn]:
    return [
        Drawn(drawn.prompt, {name: value for name, value in drawn.options.items() if name not in OF_LENGTH})
        for drawn in draw_requests(count, LIMITS, seed)
    ]


def others_like(drawn: list[Drawn], seed: int) -> list[Drawn]:
    """Return requests of the same lengths with other ids and other options."""
    rng = random.Random(seed)
    strangers = drawn_requests(len(drawn), seed)
    return [
        Drawn(
            tuple(rng.randrange(LIMITS.vocab_size) for _ in one.prompt),
            {**other.options, "max_tokens": one.options["max_tokens"], "min_tokens": 0},
        )
        for one, other in zip(drawn, strangers, strict=True)
    ]


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(max_examples=examples(16))
def test_what_neighbours_hold_and_ask_for_does_not_reach_a_request(seed: int, num_neighbours: int) -> None:
    together = Scenario("together", company=num_neighbours + 1)
    request, *neighbours = drawn_requests(num_neighbours + 1, seed)
    one = computed(loaded(()), together, [request, *neighbours])
    other = computed(loaded(()), together, [request, *others_like(neighbours, seed + 1)])
    assert digest(one[0]) == digest(other[0])


@given(st.integers(0, 2**32), st.sampled_from(SETTINGS))
@settings(max_examples=examples(32))
def test_a_request_alone_has_the_same_bits_under_any_setting(seed: int, flags: tuple[str, ...]) -> None:
    many = draw_requests(2, LIMITS, seed)
    expected = [digest(outcome) for outcome in computed(loaded(()), ALONE, many)]
    scenario = Scenario("alone", company=1, contiguous="contiguous" in flags)
    assert [digest(outcome) for outcome in computed(loaded(flags), scenario, many)] == expected
