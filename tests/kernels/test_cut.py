"""The cut of K: fixed by the weight, in slices of whole grains."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.kernels.linear import slices
from photon_grpc.kernels.linear.cut import GRAIN, MAX_SLICES, num_slices, slice_columns

sizes = st.integers(1, 2000).map(lambda number: 16 * number)


@given(sizes, sizes, st.sampled_from((16, 8, 4)))
def test_every_slice_has_columns_and_begins_at_a_grain(n: int, k: int, bits: int) -> None:
    number = num_slices(n, k, bits=bits)
    columns = slice_columns(k, number)
    assert number in (1, 2, 4) and number <= MAX_SLICES
    assert columns % GRAIN == 0
    assert (number - 1) * columns < k <= number * columns


@pytest.mark.parametrize(
    ("n", "k", "number"), [(2048, 8192, 2), (3072, 2048, 2), (2048, 2048, 1), (4096, 14336, 1), (1536, 8960, 4)]
)
def test_weights_that_are_few_rows_of_a_long_k_are_cut(n: int, k: int, number: int) -> None:
    """A change of these changes bits: it raises the numerics version."""
    assert num_slices(n, k) == number


@pytest.mark.parametrize(
    ("n", "k", "of_8_bits", "of_4_bits"),
    [(6144, 4096, 1, 2), (4096, 4096, 2, 2), (28672, 4096, 1, 1), (4096, 14336, 2, 4), (10240, 8192, 1, 2)],
)
def test_the_fewer_bits_the_more_slices(n: int, k: int, of_8_bits: int, of_4_bits: int) -> None:
    """The same holds for these."""
    assert (num_slices(n, k, bits=8), num_slices(n, k, bits=4)) == (of_8_bits, of_4_bits)


@pytest.mark.parametrize(("k", "number"), [(960, 2), (4864, 2), (8960, 4), (256, 1)])
def test_slices_sum_up_to_the_product(k: int, number: int) -> None:
    x, w = torch.randn(5, k), torch.randn(24, k)
    sums = slices.products(x, w, number)
    assert sums.shape == (number, 5, 24)
    torch.testing.assert_close(sums.double().sum(0), x.double() @ w.double().T, rtol=1e-4, atol=1e-3)
