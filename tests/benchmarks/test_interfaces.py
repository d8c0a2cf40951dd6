"""Scores of prompts that come through a interface are compared, too, where the engine gives them otherwise."""

from __future__ import annotations

import pytest

from benchmarks.bits.company import Outcome
from benchmarks.bits.compare import first_difference
from benchmarks.bits.interfaces import as_computed
from photon_grpc.core.logprobs import RECORD, LogprobParams

SCORES, OTHERS = RECORD.pack(5, -1.0, 1), RECORD.pack(5, -1.5, 1)


@pytest.mark.parametrize(
    ("output", "num_continued", "given", "is_right"),
    [
        (0, 0, SCORES, True),
        (0, 0, OTHERS, False),
        (0, 0, b"", False),
        (1, 0, SCORES, True),
        (1, 0, OTHERS, False),
        (1, 0, b"", False),
        (0, 2, b"", True),
        (0, 2, SCORES, False),
        (0, 2, OTHERS, False),
    ],
)
def test_scores_of_a_prompt_are_compared(output: int, num_continued: int, given: bytes, is_right: bool) -> None:
    first = Outcome(0, 0, prompt_records=SCORES)
    own = Outcome(0, output, prompt_records=b"" if output else SCORES)
    found = Outcome(0, output, num_continued, prompt_records=given)
    found.prompt_records = as_computed(found, own, first)
    assert (first_difference(found, own, LogprobParams(-1, 0)) is None) == is_right
