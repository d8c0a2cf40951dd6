"""A row's id and its log-probabilities are the same bits alone and in any company, at every level; by the kernels.

The vocabulary is cut into several tiles by every kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from photon_grpc.kernels import select
from photon_grpc.kernels.sampling import logprobs, process_logits, sample, sample_filtered, topk_topp
from photon_grpc.kernels.sampling.histogram import Filters, SearchSizes
from tests.kernels.sampling import metadata_of, winning_values
from tests.runner.company import ROWS, alone, check_company, check_prompt_logprobs

TRITON = select("triton", "cpu")


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    sizes, tile = SearchSizes(CHUNK=128, TILE=32, STEP=64, SAMPLED=32), {"BLOCK": 128, "num_warps": 4}
    modules = logprobs, process_logits, sample
    with patch.object(topk_topp, "SIZES", sizes):
        patches = [patch.object(module, "config", lambda: tile) for module in modules]
        for each in patches:
            each.start()
        yield
        for each in patches:
            each.stop()


@pytest.mark.parametrize("chosen", [(4, 0, 2), (2, 6, 1, 5), (10, 3, 8, 0, 9), (7, 2, 11, 1)])
def test_a_row_gets_in_company_what_it_gets_alone(chosen: tuple[int, ...]) -> None:
    logits = torch.randn(len(ROWS), 203, generator=torch.Generator().manual_seed(0)) * 3
    expected = {number: alone(number, TRITON, logits) for number in chosen}
    check_company(chosen, expected, TRITON, logits)


def test_every_kernel_divides_and_adds_noise_alike() -> None:
    logits = torch.randn(7, 203, generator=torch.Generator().manual_seed(2)) * 3
    metadata = metadata_of(torch.arange(7) * 0.3)
    filters = Filters(torch.full((7,), -1), torch.ones(7), torch.zeros(7))
    plain = winning_values(lambda: sample.launch(logits, metadata))
    assert torch.equal(plain, winning_values(lambda: sample_filtered.launch(logits, metadata, filters)))


def test_a_prompt_is_scored_as_it_would_be_while_it_is_generated() -> None:
    check_prompt_logprobs(TRITON, torch.randn(5, 203, generator=torch.Generator().manual_seed(1)) * 3, (3, 2))
