"""The choice of cases that `make test` compiles."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.each_value import each_value

CASES = st.lists(st.frozensets(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=3), max_size=12)


@given(CASES)
def test_no_value_is_left_out(cases: list[frozenset[tuple[str, int]]]) -> None:
    chosen = each_value(cases)
    assert frozenset().union(*(cases[number] for number in chosen)) == frozenset().union(*cases)
    # Each of them has a value that those chosen before it have not.
    assert len(chosen) <= len(frozenset().union(*cases))


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (4, 4, 2)])
def test_of_all_combinations_as_many_are_chosen_as_the_longest_parameter_has_values(sizes: tuple[int, ...]) -> None:
    cases = [frozenset(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    assert len(each_value([frozenset((str(name), value) for name, value in case) for case in cases])) == max(sizes)
