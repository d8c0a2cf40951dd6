"""What is in limbo comes out when all that could touch it has ended, in whatever order, and waits for nothing else."""

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


#: Admit a prompt of so many blocks; begin a step or a transfer of a sequence; end the oldest step, or any transfer; let
#: a sequence go, or all prefixes be forgotten.
uses = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "step", "step", "end", "transfer", "over", "release", "forget"]),
        st.integers(0, 7),
    ),
    max_size=80,
)


class Used:
    """A pool whose blocks are in use by sequences, by steps in flight and by transfers."""

    def __init__(self, windows: tuple[int, ...], num_blocks: int = 12) -> None:
        plan = kv_plan(2, *windows)
        self.pool = BlockPool(plan, num_blocks, RadixIndex(plan), GrowOnDemand())
        #: Sequence -> the newest step that touches it.
        self.seqs: dict[Sequence, int] = {}
        #: Ticket -> the blocks that are touched.
        self.steps: dict[int, set[int]] = {}
        self.transfers: dict[int, set[int]] = {}

    def do(self, verb: str, number: int) -> None:
        seqs = list(self.seqs)
        seq = seqs[number % len(seqs)] if seqs else None
        if verb == "admit":
            self.admit(1 + number)
        elif verb == "step" and seq:
            ticket = self.seqs[seq] = self.pool.fences.open()
            self.steps[ticket] = self.blocks(seq)
        elif verb == "end" and self.steps:
            self.end(next(iter(self.steps)))
        elif verb == "transfer" and seq:
            blocks = {block for block in self.blocks(seq) if block % 3 != number % 3}
            self.transfers[self.pool.open_transfer(blocks)] = blocks
        elif verb == "over" and self.transfers:
            self.over(list(self.transfers)[number % len(self.transfers)])
        elif verb == "release" and seq:
            self.pool.release(seq.table, self.seqs.pop(seq))
        elif verb == "forget":
            self.pool.reset_prefixes()
        self.pool.check()

    def admit(self, length: int) -> None:
        """Equal prompts, so that blocks are shared and found again, also out of limbo."""
        seq = Sequence(Request("r", tuple(range(length)), SamplingParams(), StopParams(8), 0.0), 1, 0, 0, (0.0, 0))
        if self.pool.admit(seq, (0, "", ""), 0):
            self.seqs[seq] = 0
            fresh = {block for group in seq.table.groups for block in group[seq.num_computed // 2 :]}
            assert all(fresh.isdisjoint(blocks) for blocks in (*self.steps.values(), *self.transfers.values()))
            self.pool.publish(seq, len(seq.ids))

    def end(self, ticket: int) -> None:
        del self.steps[ticket]
        self.pool.fences.close(ticket)
        self.pool.open_limbo()

    def over(self, ticket: int) -> None:
        del self.transfers[ticket]
        self.pool.close_transfer(ticket)

    @staticmethod
    def blocks(seq: Sequence) -> set[int]:
        return {block for group in seq.table.groups for block in group if block}


@given(st.sampled_from([(0,), (0, 3)]), uses)
def test_no_block_is_written_anew_while_work_on_it_is_under_way_and_none_waits_for_other_work(
    windows: tuple[int, ...], happenings: list[tuple[str, int]]
) -> None:
    used = Used(windows)
    for verb, number in happenings:
        used.do(verb, number)
        touched = set().union(*used.steps.values(), *used.transfers.values())
        assert all(block in touched for block in range(1, 13) if block in used.pool._limbo)
        assert all(used.pool._references[block] or block in used.pool._limbo for block in touched)
    for seq, fence in used.seqs.items():
        used.pool.release(seq.table, fence)
    for ticket in list(used.steps):
        used.end(ticket)
    for ticket in list(used.transfers):
        used.over(ticket)
    used.pool.check()
    assert used.pool.num_available == used.pool.num_blocks


def test_a_transfer_holds_back_its_own_blocks_for_thousands_of_steps_and_no_others() -> None:
    used = Used((0,))
    used.admit(4)
    (first,) = used.seqs
    held = used.blocks(first)
    ticket = used.pool.open_transfer(held)
    used.do("release", 0)
    for _ in range(3000):
        used.admit(7)
        used.do("step", 0)
        used.do("release", 0)
        assert used.pool.num_limbo > len(held)
        used.do("end", 0)
        assert used.pool.num_limbo == len(held), "nothing but what the transfer names"
        used.do("forget", 0)
    used.pool.close_transfer(ticket)
    assert used.pool.num_limbo == 0 and used.pool.num_available == used.pool.num_blocks


def test_a_cached_block_under_transfer_is_found_but_not_evicted() -> None:
    used = Used((0,), num_blocks=3)
    used.admit(5)
    (first,) = used.seqs
    first_block = first.table.groups[0][0]
    used.do("release", 0)
    assert used.pool.num_available == 3
    ticket = used.pool.open_transfer([first_block])
    assert (used.pool.num_limbo, used.pool.num_available) == (1, 2)
    used.admit(3)
    (found,) = used.seqs
    assert found.table.groups[0][0] == first_block and found.num_computed == 2
    used.do("release", 0)
    used.pool.close_transfer(ticket)
    assert (used.pool.num_limbo, used.pool.num_available) == (0, 3)


def test_what_a_transfer_holds_is_not_waited_for() -> None:
    used = Used((0,), num_blocks=3)
    used.admit(3)
    used.do("step", 0)
    other = Sequence(Request("r", (9,), SamplingParams(), StopParams(8), 0.0), 1, 0, 0, (0.0, 0))
    assert used.pool.admit(other, None, 0)
    used.do("release", 0)
    assert used.pool.waiting_covers(6, other), "the step gives two blocks back"
    used.transfers[used.pool.open_transfer([1, 2, 3])] = {1, 2, 3}
    assert not used.pool.waiting_covers(6, other)


def test_a_block_waits_for_every_transfer_that_names_it() -> None:
    used = Used((0,))
    used.admit(4)
    first, second = (used.pool.open_transfer([1, 2]) for _ in range(2))
    used.do("release", 0)
    used.pool.close_transfer(second)
    assert used.pool.num_limbo == 2
    used.pool.close_transfer(first)
    assert used.pool.num_limbo == 0
