"""What is in limbo comes out when all that could touch it has ended, in whatever order it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.allocation import GrowOnDemand
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.fences import Fences, Limbo
from photon_grpc.engine.blocks.prefix_index import RadixIndex
from tests.kv_plans import kv_plan

#: Open a ticket; close one of those open; put an item behind all that are open; look what came out.
changes = st.lists(
    st.tuples(st.sampled_from(["open", "open", "close", "put", "put", "look"]), st.integers(0, 7)), max_size=60
)


@given(changes)
def test_an_item_comes_out_when_every_ticket_open_at_its_release_has_closed(happenings: list[tuple[str, int]]) -> None:
    fences, open_tickets = Fences(), list[int]()
    limbo, awaits = Limbo(fences), dict[int, set[int]]()
    for item, (verb, number) in enumerate(happenings):
        if verb == "open":
            open_tickets.append(fences.open())
        elif verb == "close" and open_tickets:
            ticket = open_tickets.pop(number % len(open_tickets))
            fences.close(ticket)
            for tickets in awaits.values():
                tickets.discard(ticket)
        elif verb == "put" and open_tickets:
            awaits[item] = set(open_tickets)
            limbo.put(item, max(open_tickets))
        elif verb == "look":
            due = {item for item, tickets in awaits.items() if not tickets}
            assert set(limbo.opened()) == due
            awaits = {item: tickets for item, tickets in awaits.items() if item not in due}
        assert len(limbo) == len(awaits) and all(item in limbo for item in awaits)


def test_a_ticket_closes_once() -> None:
    fences = Fences()
    ticket = fences.open()
    fences.close(ticket)
    with pytest.raises(KeyError):
        fences.close(ticket)


#: Admit a prompt of so many blocks; have work begin on a sequence; end some work; let a sequence go.
uses = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "work", "work", "end", "release"]), st.integers(0, 7)), max_size=60
)


@given(st.sampled_from([(0,), (0, 3)]), uses)
def test_no_block_is_written_anew_while_work_on_it_is_under_way(
    windows: tuple[int, ...], happenings: list[tuple[str, int]]
) -> None:
    """Equal prompts, so that blocks are shared and found again, also out of limbo."""
    plan = kv_plan(2, *windows)
    pool = BlockPool(plan, 12, RadixIndex(plan), GrowOnDemand())
    seqs: dict[Sequence, int] = {}
    #: Ticket -> the blocks that its work touches.
    touched: dict[int, set[int]] = {}
    for verb, number in happenings:
        if verb == "admit":
            request = Request("r", tuple(range(1 + number)), SamplingParams(), StopParams(8), 0.0)
            seq = Sequence(request, 1, 0, 0, (0.0, 0))
            if pool.admit(seq, (0, "", ""), 0):
                seqs[seq] = 0
                fresh = {block for group in seq.table.groups for block in group[seq.num_computed // 2 :]}
                assert all(fresh.isdisjoint(blocks) for blocks in touched.values())
                pool.publish(seq, len(seq.ids))
        elif verb == "work" and seqs:
            seq = list(seqs)[number % len(seqs)]
            seqs[seq] = pool.fences.open()
            touched[seqs[seq]] = {block for group in seq.table.groups for block in group if block}
        elif verb == "end" and touched:
            ticket = list(touched)[number % len(touched)]
            del touched[ticket]
            pool.fences.close(ticket)
            pool.open_limbo()
        elif verb == "release" and seqs:
            seq = list(seqs)[number % len(seqs)]
            pool.release(seq.table, seqs.pop(seq))
        pool.check()
    for seq, fence in seqs.items():
        pool.release(seq.table, fence)
    for ticket in touched:
        pool.fences.close(ticket)
    pool.open_limbo()
    pool.check()
    assert pool.num_available == pool.num_blocks
