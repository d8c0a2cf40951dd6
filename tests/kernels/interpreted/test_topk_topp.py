"""What filters keep, listed and searched in the interpreter: the same set as by sorting."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from photon_grpc.kernels.sampling import sample, topk_topp
from photon_grpc.kernels.sampling import sample_filtered as sample_filtered
from photon_grpc.kernels.sampling.histogram import Filters, SearchSizes
from tests.examples import examples
from tests.kernels.sampling import filters_of, metadata_of, thresholds


@pytest.mark.parametrize(
    ("num_columns", "banned", "ties"),
    [
        *((50, banned, ties) for banned in (False, True) for ties in (False, True)),
        (5000, True, True),
        *(pytest.param(5000, *each, marks=pytest.mark.full) for each in ((False, False), (False, True), (True, False))),
    ],
)
def test_the_same_tokens_are_kept(num_columns: int, banned: bool, ties: bool) -> None:
    torch.manual_seed(num_columns)
    scaled = torch.randn(7, num_columns) * 3
    if ties:
        scaled = scaled.round()
        scaled[0, :5] = -0.0
    if banned:
        scaled[:, : num_columns // 2] = -torch.inf
    top_k = torch.tensor([-1, 1, 5, 40, num_columns, 7, -1])
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.95, 0.3, 1.0, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0, 0.2, 0.0, 0.1])
    mine = thresholds(scaled, top_k, top_p, min_p)
    theirs = topk_topp.reference(scaled, top_k, top_p, min_p)
    assert not ((scaled >= mine[:, None]) != (scaled >= theirs[:, None])).logical_and(scaled.isfinite()).any()


@pytest.mark.parametrize("find", [thresholds, topk_topp.reference])
def test_the_likeliest_is_always_kept(find: Callable[..., torch.Tensor]) -> None:
    """Alone where a filter leaves no other: a top_p so small that it is 0 as float32, a min_p of 1."""
    top_k = torch.tensor([-1, -1, -1, 1, 5, 40, 40])
    top_p = torch.tensor([0.0, 1e-45, 1.0, 1.0, 0.0, 0.0, 1e-6])
    min_p = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    for width in (0.01, 60.0):
        scaled = torch.randn(7, 200, generator=torch.Generator().manual_seed(2)) * width
        assert torch.equal(find(scaled, top_k, top_p, min_p), scaled.amax(-1))


def test_the_likeliest_is_kept_where_a_logarithm_of_1_is_above_0() -> None:
    """As a device's approximate one may be."""
    scaled = torch.randn(3, 50) / 10
    above = torch.full((3,), 1.0 + 2**-20)
    assert torch.equal(thresholds(scaled, torch.tensor([-1, 1, 5]), torch.ones(3), above), scaled.amax(-1))


def test_a_row_that_is_not_finite_ends() -> None:
    scaled = torch.randn(2, 60)
    scaled[0, 3] = torch.nan
    thresholds(scaled, torch.tensor([4, 4]), torch.tensor([0.9, 0.9]), torch.tensor([0.0, 0.0]))


# So small that short rows have several chunks, lists that do not fit into a tile, and searches of several steps.
SMALL = SearchSizes(CHUNK=32, TILE=8, STEP=16, SAMPLED=8)
# The width of a row's logits: flat, inside one bin, a few bins, further apart than all bins reach.
WIDTHS = [0.0, 0.02, 1.0, 4.0, 60.0]


def row_of(seed: int, num_columns: int, width: float, banned: float, steps: int) -> torch.Tensor:
    """Return normal logits, part of which is banned, in `steps` values a unit (0: all different)."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(num_columns, generator=generator) * width
    row = (row * steps).round() / steps if steps else row
    return row.masked_fill(torch.rand(num_columns, generator=generator) < banned, -torch.inf)


@settings(max_examples=examples(8), deadline=None)
@given(
    seed=st.integers(0, 10000),
    num_columns=st.sampled_from([1, 31, 64, 130]),
    width=st.sampled_from(WIDTHS),
    banned=st.sampled_from([0.0, 0.5, 0.98]),
    steps=st.sampled_from([0, 1, 8]),
    top_k=st.sampled_from([-1, 1, 2, 10, 17, 60, 129, 130]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
)
@example(0, 130, 0.0, 0.0, 0, 1, 0.5, 0.0)
@example(0, 130, 60.0, 0.0, 0, 100, 0.9, 0.0)
@example(0, 130, 4.0, 0.0, 1, -1, 0.9, 0.0)
def test_any_row_keeps_what_sorting_keeps(
    seed: int, num_columns: int, width: float, banned: float, steps: int, top_k: int, top_p: float, min_p: float
) -> None:
    scaled = row_of(seed, num_columns, width, banned, steps)[None]
    if not scaled.isfinite().any():
        return
    with patch.object(topk_topp, "SIZES", SMALL):
        mine = thresholds(scaled, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    kept = (scaled >= mine[:, None]) & scaled.isfinite()
    # A sum that meets top_p but for its rounding may go either way.
    for share, differs in ((top_p * (1 - 1e-5), lambda least: least & ~kept), (top_p * (1 + 1e-5), kept.__gt__)):
        theirs = topk_topp.reference(
            scaled.double(),
            torch.tensor([top_k]),
            torch.tensor([share], dtype=torch.float64),
            torch.tensor([min_p]).double(),
        )
        assert not differs(scaled.double() >= theirs[:, None]).logical_and(scaled.isfinite()).any()


def test_the_batch_does_not_matter() -> None:
    """To the last bit: what a row's threshold is next to others, alone, and in a strided tensor."""
    wide = torch.randn(4, 200)
    scaled = wide[:, :100]
    options = torch.tensor([-1, 7, 50, -1]), torch.tensor([0.9, 1.0, 0.8, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.2])
    with patch.object(topk_topp, "SIZES", SMALL):
        together = thresholds(scaled, *options)
        alone = [
            thresholds(scaled[row : row + 1].contiguous(), *(each[row : row + 1] for each in options))
            for row in range(4)
        ]
    assert torch.equal(together, torch.cat(alone))


# Greedy, temperature alone, each filter, several, banned, not finite.
TEMPERATURES = [0.0, 0.7, 0.7, 1.0, 1.3, 0.5, 0.9, 0.0, 0.8, 1.1]
TOP_K = [-1, -1, 9, -1, 40, -1, 3, 5, -1, 7]
TOP_P = [1.0, 1.0, 1.0, 0.8, 0.9, 1.0, 0.5, 0.5, 0.95, 0.9]
MIN_P = [0.0, 0.0, 0.0, 0.0, 0.01, 0.1, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("sizes", [SMALL, topk_topp.SIZES])
def test_ids_are_those_of_the_reference(sizes: SearchSizes) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(10, 120, generator=generator) * 3
    logits[0, 40:42] = logits[1, 3] = 20.0
    logits[6, 20:] = -torch.inf
    logits[8] = -torch.inf
    logits[9, 100] = torch.nan
    metadata = metadata_of(torch.tensor(TEMPERATURES))
    filters = filters_of(*(torch.tensor(each) for each in (TOP_K, TOP_P, MIN_P)))
    with patch.object(topk_topp, "SIZES", sizes):
        mine = sample_filtered.launch(logits, metadata, filters)
    theirs = sample_filtered.reference(logits, metadata, filters)
    assert torch.equal(mine, theirs) and mine[0] == 40 and mine[8:].tolist() == [-1, -1]
    is_constrained = torch.arange(10) != 7
    with patch.object(topk_topp, "SIZES", sizes):
        told = sample_filtered.launch(logits, metadata, filters, is_constrained)
    assert torch.equal(told, sample_filtered.reference(logits, metadata, filters, is_constrained))
    assert torch.equal(told[:8], mine[:8]) and told[8:].tolist() == [sample.NOTHING, sample.INVALID]


def test_rows_without_filters_draw_what_they_draw_on_the_plain_level() -> None:
    logits = torch.randn(4, 130, generator=torch.Generator().manual_seed(5))
    metadata = metadata_of(torch.tensor([0.0, 0.6, 1.0, 3.0]))
    filters = Filters(torch.full((4,), -1), torch.ones(4), torch.zeros(4))
    with patch.object(topk_topp, "SIZES", SMALL):
        mine = sample_filtered.launch(logits, metadata, filters)
    assert torch.equal(mine, sample.launch(logits, metadata))
