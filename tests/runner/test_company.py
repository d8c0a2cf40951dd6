"""A row's id and its log-probabilities are the same bits alone and in any company, at every level; in torch."""

from __future__ import annotations

import functools

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from photon_grpc.kernels import TORCH
from tests.examples import examples
from tests.runner.company import ROWS, alone, check_company, check_prompt_logprobs

NUM_COLUMNS = 1003


@functools.cache
def logits() -> torch.Tensor:
    return torch.randn(len(ROWS), NUM_COLUMNS, generator=torch.Generator().manual_seed(0)) * 3


@functools.cache
def expected() -> dict[int, tuple[int, bytes]]:
    return {number: alone(number, TORCH, logits()) for number in range(len(ROWS))}


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, len(ROWS) - 1), min_size=1, max_size=len(ROWS), unique=True))
def test_a_row_gets_in_any_company_what_it_gets_alone(chosen: list[int]) -> None:
    check_company(chosen, expected(), TORCH, logits())


def test_a_prompt_is_scored_as_it_would_be_while_it_is_generated() -> None:
    scored = torch.randn(133, NUM_COLUMNS, generator=torch.Generator().manual_seed(1)) * 3
    check_prompt_logprobs(TORCH, scored, (70, 1, 62))
