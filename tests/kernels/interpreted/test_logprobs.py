"""Log-probabilities by the kernels in the interpreter: equal to sorting the log-softmax."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from photon_grpc.kernels.sampling import logprobs
from tests.kernels.scored import asking, assert_equal_records, sorted_scores


@pytest.mark.parametrize("num_columns", [50, 128])
def test_records_are_those_of_a_sorted_log_softmax(num_columns: int) -> None:
    torch.manual_seed(num_columns)
    wide, ids, asked = torch.randn(7, 400) * 3, torch.randint(0, num_columns, (7,)), asking(7, num_columns)
    logits = wide[:, :num_columns]
    with patch.object(logprobs, "config", lambda: {"BLOCK": 64}):
        records = logprobs.launch(logits, ids, asked)
    assert_equal_records(records, sorted_scores(logits, ids, asked))


@pytest.mark.parametrize(("block", "turned"), [(32, 0), (128, 4)])
def test_equal_values_share_a_rank_and_stand_in_the_order_of_their_ids(block: int, turned: int) -> None:
    """Rank rows of one value, of few, of zeros of both signs, and of ids that cannot be sampled.

    Slot 1, which asks for the most, is the row of one value, or that of few finite ones.
    """
    logits, ids = torch.zeros(6, 120), torch.tensor([119, 0, 7, 3, 4, 5])
    logits[3:] = torch.randn(3, 120, generator=torch.Generator().manual_seed(1)).round()
    logits[4, ::2] = -0.0
    logits[5, :110] = -torch.inf
    asked = asking(6, 120)
    asked = asked._replace(slots=asked.slots.roll(turned))
    with patch.object(logprobs, "config", lambda: {"BLOCK": block}):
        records = logprobs.launch(logits, ids, asked)
    assert_equal_records(records, sorted_scores(logits, ids, asked))


def test_rows_that_ask_for_nothing_and_rows_that_failed_hurt_no_other() -> None:
    logits, ids, asked = torch.randn(6, 100), torch.tensor([1, -1, 3, -2, 5, 6]), asking(6, 100)
    logits[1], logits[3, 7] = torch.nan, torch.inf
    expected = sorted_scores(logits, ids, asked)
    records = logprobs.launch(logits, ids, asked)
    sound = torch.tensor([0, 2, 4, 5])
    assert_equal_records(records[sound], [expected[row] for row in sound.tolist()])
