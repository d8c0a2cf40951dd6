"""What the slot table remembers on the host, and for how long."""

from __future__ import annotations

import torch

from photon_grpc.core.batch import Admission, Batch
from photon_grpc.core.request import SamplingParams
from photon_grpc.runner.slot_table import SlotTable
from tests.kv_plans import kv_plan

SLOT = 1


def admission(ids: tuple[int, ...], min_tokens: int, num_prompt: int = 3) -> Admission:
    sampling = SamplingParams(temperature=0.7, top_k=5)
    return Admission(SLOT, ids, num_prompt, 0, ((1,),), sampling, min_tokens=min_tokens, banned_until_min=(7,))


def launch(table: SlotTable, count: int, **changes: object) -> None:
    batch = Batch(1, (SLOT,), (count,), (1,), **changes)  # type: ignore[arg-type]
    table.apply(batch)
    table.advance(batch)


def test_a_ban_lasts_exactly_as_long_as_it_can_apply() -> None:
    table = SlotTable(2, 32, kv_plan(8), 50, torch.device("cpu"))
    launch(table, 3, admissions=(admission((1, 2, 3), min_tokens=3),))
    # The first of three tokens is sampled; two more steps sample below the minimum.
    assert SLOT in table.banned
    launch(table, 1)
    assert SLOT in table.banned
    launch(table, 1)
    assert SLOT not in table.banned


def test_what_resumes_above_its_minimum_is_not_banned() -> None:
    table = SlotTable(2, 32, kv_plan(8), 50, torch.device("cpu"))
    table.apply(Batch(1, (SLOT,), (6,), (1,), admissions=(admission((1, 2, 3, 4, 5, 6), min_tokens=3),)))
    assert not table.banned


def test_a_slot_that_is_left_is_forgotten() -> None:
    table = SlotTable(2, 32, kv_plan(8), 50, torch.device("cpu"))
    launch(table, 3, admissions=(admission((1, 2, 3), min_tokens=20),))
    assert (table.filtered, set(table.banned)) == ({SLOT}, {SLOT})
    table.apply(Batch(2, (), (), (), left=(SLOT,)))
    assert not (table.filtered or table.banned)


def test_a_ban_outlives_refused_drafts() -> None:
    table = SlotTable(2, 64, kv_plan(8), 320, torch.device("cpu"))
    admission = Admission(1, (1, 5, 9), 3, 0, ((1, 2),), SamplingParams(0.0), min_tokens=4, banned_until_min=(7,))
    first = Batch(1, (1,), (3,), (1,), admissions=(admission,))
    table.apply(first)
    table.advance(first)
    table.advance(Batch(2, (1,), (4,), (4,), drafts=3))
    assert 1 in table.banned
