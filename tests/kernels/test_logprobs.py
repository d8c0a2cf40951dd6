"""Log-probabilities in torch: equal to sorting the log-softmax."""

from __future__ import annotations

import pytest
import torch

from photon_grpc.kernels.sampling import logprobs, sample
from tests.kernels.scored import asking, assert_equal_records, sorted_scores


@pytest.mark.parametrize("num_columns", [50, 3000])
def test_records_are_those_of_a_sorted_log_softmax(num_columns: int) -> None:
    torch.manual_seed(num_columns)
    logits, ids, asked = torch.randn(6, num_columns) * 3, torch.randint(0, num_columns, (6,)), asking(6, num_columns)
    assert_equal_records(logprobs.reference(logits, ids, asked), sorted_scores(logits, ids, asked))


def test_equal_values_share_a_rank_and_stand_in_the_order_of_their_ids() -> None:
    logits, ids = torch.zeros(6, 300), torch.tensor([299, 0, 7, 3, 4, 5])
    logits[3:] = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)).round()
    logits[4, ::2] = -0.0
    logits[5, :290] = -torch.inf
    asked = asking(6, 300)
    records = logprobs.reference(logits, ids, asked)
    assert_equal_records(records, sorted_scores(logits, ids, asked))
    assert records[1, 1:21, 0].tolist() == list(range(20)) and set(records[1, 1:21, 2].tolist()) == {1}


def test_rows_that_ask_for_nothing_and_rows_that_failed_hurt_no_other() -> None:
    logits, ids, asked = torch.randn(6, 100), torch.tensor([1, -1, 3, -2, 5, 6]), asking(6, 100)
    logits[1] = torch.nan
    expected = sorted_scores(logits, ids, asked)
    records = logprobs.reference(logits, ids, asked)
    sound = torch.tensor([0, 2, 4, 5])
    assert_equal_records(records[sound], [expected[row] for row in sound.tolist()])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_number_of_rows_has_kernels_compiled_of_its_own(num_rows: int) -> None:
    """As pointers that do not begin at 16 bytes would."""
    device = torch.device("cpu")
    tensors = [*logprobs._scratch(num_rows, 5, device), *sample.best_of_tiles(num_rows, 5, device, is_processed=True)]
    assert not any(tensor is not None and tensor.data_ptr() % 16 for tensor in tensors)
