"""Sampled ids have the distribution that their options define: chi-square tests of the sampler.

The expected shares are computed one by one, in Python's floats, from the definitions.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.kernels import select
from photon_grpc.runner.sampler import Sampler
from photon_grpc.runner.slot_table import SlotTable
from tests.kv_plans import kv_plan
from tests.runner.test_sampling import Identity

LOGITS = [1.0, 2.0, 0.5, -1.0, 2.2, 0.0, -0.7, 1.5, 1.9, -0.2, 0.8, 1.2]
VOCAB_SIZE = len(LOGITS)
PROMPT, OUTPUT = [1, 1, 3, 6], [4, 4, 4, 8, 3]
SEEDS = 3, 2**63 + 5
#: Of each seed, by whether noise is made for the kept ids alone, which takes half a millisecond a row.
NUM_POSITIONS = {True: 400, False: 3000}
#: One set in a million with the distribution is refused; the seeds are fixed, so that none is by chance.
P_VALUE = 1e-6
BIAS = ((2, 1.5), (4, -2.0), (9, 2.5))
ODD = tuple(range(1, VOCAB_SIZE, 2))
ALL = range(VOCAB_SIZE)
#: Where one holds, noise is made for the kept ids alone.
FILTERS = {"top_k", "top_p", "min_p"}

CASES: dict[str, tuple[dict[str, Any], Collection[int]]] = {
    "temperature": ({"temperature": 0.6}, ALL),
    "top_k": ({"top_k": 5}, ALL),
    "top_p": ({"top_p": 0.7}, ALL),
    "min_p": ({"min_p": 0.3}, ALL),
    "filters": ({"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.4}, ALL),
    "repetition": ({"repetition_penalty": 1.6}, ALL),
    "presence": ({"presence_penalty": 1.2}, ALL),
    "frequency": ({"frequency_penalty": 0.5}, ALL),
    "negative": ({"presence_penalty": -0.5, "frequency_penalty": -0.4}, ALL),
    "bias": ({"logit_bias": BIAS}, ALL),
    "allowed": ({"allowed_token_ids": ODD}, ALL),
    "mask": ({}, {0, 2, 4, 5, 11}),
    "mask and filters": ({"top_k": 4, "top_p": 0.8, "min_p": 0.1}, {0, 2, 4, 5, 10, 11}),
    "mask and penalties": ({"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {1, 3, 4, 7, 8}),
    "all": (
        {
            "temperature": 0.8,
            "top_k": 6,
            "top_p": 0.95,
            "min_p": 0.05,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "logit_bias": BIAS,
            "allowed_token_ids": tuple(range(1, VOCAB_SIZE)),
        },
        {1, 2, 3, 4, 7, 8, 9, 10},
    ),
}


def shares(sampling: SamplingParams, mask: Collection[int]) -> list[float]:
    """Return the probability of each id."""
    logits = list(LOGITS)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in {*PROMPT, *OUTPUT}:
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(OUTPUT).items():
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    may = set(mask) & set(sampling.allowed_token_ids or ALL)
    weights = {token: math.exp(logits[token] / sampling.temperature) for token in may}
    best_first = sorted(may, key=lambda token: -weights[token])[: sampling.top_k if sampling.top_k > 0 else None]
    total, before, kept = sum(weights[token] for token in best_first), 0.0, []
    for token in best_first:  # the fewest that have top_p together
        if before < sampling.top_p * total:
            kept.append(token)
        before += weights[token]
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[best_first[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in ALL]


def frequencies(sampling: SamplingParams, mask: Collection[int], *, few: bool) -> list[int]:
    """Return how often each id is sampled: at many positions of two outputs of two seeds. `few`: as on a CPU."""
    table = SlotTable(1 + len(SEEDS), 64, kv_plan(8), VOCAB_SIZE, torch.device("cpu"))
    slots = tuple(range(1, 1 + len(SEEDS)))
    ids, blocks = (*PROMPT, *OUTPUT), ((1, 2),)
    seeded = [SamplingParams(**{**options_of(sampling), "seed": seed}) for seed in SEEDS]
    admissions = tuple(
        Admission(slot, ids, len(PROMPT), 0, blocks, each) for slot, each in zip(slots, seeded, strict=True)
    )
    rows, masked = (len(ids),) * len(slots), tuple(range(len(slots))) if len(mask) < VOCAB_SIZE else ()
    batch = Batch(1, slots, rows, (1,) * len(slots), admissions=admissions, masked=masked)
    table.apply(batch)
    if masked:
        word = sum(1 << token for token in mask).to_bytes(4, "little")
        table.mask(memoryview(bytearray(word * len(masked))))
    sampler = Sampler(Identity(), table, select("torch", "cpu"))
    sampler._on_cpu = few
    of_slots = torch.tensor(slots).repeat_interleave(NUM_POSITIONS[few])
    lengths = len(ids) + torch.arange(NUM_POSITIONS[few]).repeat(len(slots))
    logits = torch.tensor(LOGITS).repeat(len(of_slots), 1)
    return torch.bincount(sampler(logits, of_slots, lengths, sampler.level(batch)).ids, minlength=VOCAB_SIZE).tolist()


@functools.cache
def sampled(case: str, *, few: bool) -> list[int]:
    """Return the frequencies of a case, drawn once for all tests."""
    options, mask = CASES[case]
    return frequencies(SamplingParams(**options), mask, few=few)


def options_of(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def p_value(observed: list[int], expected: list[float]) -> float:
    """Return the p-value of Pearson's chi-square test; 0 if an impossible id was sampled."""
    possible = [token for token in ALL if expected[token] > 0]
    if any(count for token, count in enumerate(observed) if token not in possible):
        return 0.0
    total = sum(observed)
    distance = sum((observed[each] - total * expected[each]) ** 2 / (total * expected[each]) for each in possible)
    halves = torch.tensor([(len(possible) - 1) / 2, distance / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


@pytest.mark.parametrize(
    ("case", "few"),
    [
        *((case, True) for case in CASES if not FILTERS.isdisjoint(CASES[case][0])),
        *((case, False) for case in CASES if FILTERS.isdisjoint(CASES[case][0])),
        # Without filters a CPU keeps every id.
        ("temperature", True),
        *(
            pytest.param(case, True, marks=pytest.mark.full)
            for case in CASES
            if FILTERS.isdisjoint(CASES[case][0]) and case != "temperature"
        ),
    ],
)
def test_ids_have_the_distribution_that_the_options_define(case: str, few: bool) -> None:
    options, mask = CASES[case]
    sampling = SamplingParams(**options)
    observed = sampled(case, few=few)
    assert sum(observed) == len(SEEDS) * NUM_POSITIONS[few]
    assert p_value(observed, shares(sampling, mask)) > P_VALUE
    # The test tells it from the model's own distribution.
    assert p_value(observed, shares(SamplingParams(), ALL)) < P_VALUE


@pytest.mark.parametrize("case", ["presence", "frequency", "repetition", "min_p", "top_p", "bias"])
def test_a_strength_that_is_a_little_off_is_noticed(case: str) -> None:
    options, mask = CASES[case]
    observed = sampled(case, few=not FILTERS.isdisjoint(options))
    (name, value), *_ = options.items()
    off = tuple((token, bias * 0.8) for token, bias in value) if name == "logit_bias" else value * 0.8
    assert p_value(observed, shares(SamplingParams(**{name: off}), mask)) < P_VALUE
