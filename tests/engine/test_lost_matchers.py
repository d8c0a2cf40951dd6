"""Outputs whose matchers are lost: the ids and the end that they have without."""

from __future__ import annotations

import pytest

from photon_grpc.core.request import FinishReason
from tests.engine.fakes import complete
from tests.engine.harness import Harness, Setting
from tests.engine.tables import END, Table

#: Ids of class 1, then 2, then 3, then only the end.
THREE = Table(({1: 1}, {2: 2}, {3: 3}, {}), frozenset({3}))
PAIRS = Table(({1: 1}, {2: 0}), frozenset({0}))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_calls", range(9))
@pytest.mark.parametrize("is_next_turn", [False, True])
def test_ids_equal_those_of_a_live_matcher(depth: int, num_calls: int, is_next_turn: bool) -> None:
    h = Harness(Setting(depth=depth))
    h.grammars.losses["lost"] = [num_calls, num_calls]
    if is_next_turn:
        h.grammars.next_turn["lost"] = h.post.wake
    lost = h.add([1], 12, seed=1, table=PAIRS, stop=(END,), request_id="lost")
    beside = h.add([1], 12, seed=2, table=PAIRS, stop=(END,))
    h.run()
    assert h.outcomes[lost].ids == complete([1], 12, seed=1, stop=frozenset({END}), table=PAIRS)
    assert h.outcomes[beside].ids == complete([1], 12, seed=2, stop=frozenset({END}), table=PAIRS)
    assert h.idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_calls", range(7))
def test_an_output_that_is_complete_with_its_last_token_says_so(depth: int, num_calls: int) -> None:
    h = Harness(Setting(depth=depth))
    h.grammars.losses["lost"] = [num_calls]
    lost = h.add([1], 3, seed=1, table=THREE, stop=(END,), request_id="lost")
    h.run()
    assert len(h.outcomes[lost].ids) == 3
    assert h.outcomes[lost].finished.reason is FinishReason.CONSTRAINT_COMPLETE and h.idle()


def test_waiting_work_is_dropped_with_the_engine() -> None:
    h = Harness()
    h.add([1], 3, table=THREE)
    h.grammars.losses["r0"] = [1]
    h.grammars.next_turn["r0"] = lambda event: None
    h.run()
    h.engine.stop()
    h.engine.run()
    assert all(each.is_cancelled for each in h.grammars.preparations if each.is_anew)
