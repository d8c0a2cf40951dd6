"""What the pool and its index promise to one another when something known is forgotten."""

from __future__ import annotations

from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.allocation import GrowOnDemand
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.prefix_index import NoPrefixIndex, RadixIndex
from tests.kv_plans import kv_plan

ROOT = (0, "", "")


def new_pool(num_blocks: int) -> BlockPool:
    plan = kv_plan(2)
    return BlockPool(plan, num_blocks, RadixIndex(plan), GrowOnDemand())


def admitted(pool: BlockPool, ids: tuple[int, ...]) -> Sequence:
    request = Request("r", ids, SamplingParams(), StopParams(8), 0.0)
    seq = Sequence(request, 1, 0, 0, (0.0, 0))
    assert pool.admit(seq, ROOT, 0)
    return seq


def test_nothing_is_published_below_a_block_that_was_forgotten_meanwhile() -> None:
    pool = new_pool(3)
    first = admitted(pool, (1, 2, 3, 4))
    assert len(pool.publish(first, 2)) == 1
    pool.reset_prefixes()
    assert pool.publish(first, 4) == []
    pool.release(first.table, 0)
    pool.check()
    assert pool.num_free == 3, "a block that can never be reached again is kept"
    # Its place holds other ids now; those that followed the old ones must not be found behind these.
    second = admitted(pool, (7, 8, 9))
    pool.publish(second, 2)
    pool.release(second.table, 0)
    assert admitted(pool, (7, 8, 3, 4, 5)).num_computed == 2


def test_a_prefix_is_forgotten_with_all_that_hangs_from_it() -> None:
    pool = new_pool(8)
    seq = admitted(pool, (1, 2, 3, 4, 5))
    pool.publish(seq, 4)
    other = admitted(pool, (1, 2, 9, 9, 9))
    assert other.num_computed == 2
    pool.publish(other, 4)
    pool.forget_prefix(seq)
    pool.check()
    assert admitted(pool, (1, 2, 9, 9, 9)).num_computed == 0


def cached(pool: BlockPool, ids: tuple[int, ...]) -> None:
    """Leaves the whole blocks of `ids` known and unreferenced."""
    seq = admitted(pool, ids)
    pool.publish(seq, len(ids))
    pool.release(seq.table, 0)


def num_known(pool: BlockPool, ids: tuple[int, ...]) -> int:
    return len(pool._index.match(ROOT, ids, len(ids)))


def test_the_longest_unused_prefix_is_evicted_first_from_its_end() -> None:
    pool = new_pool(6)
    cached(pool, (1, 2, 3, 4, 5, 6))
    cached(pool, (7, 8, 9, 10, 11, 12))
    admitted(pool, (20, 21))
    assert (num_known(pool, (1, 2, 3, 4, 5, 6)), num_known(pool, (7, 8, 9, 10, 11, 12))) == (2, 3)
    admitted(pool, (22, 23, 24))
    assert (num_known(pool, (1, 2, 3, 4, 5, 6)), num_known(pool, (7, 8, 9, 10, 11, 12))) == (0, 3)


def test_blocks_of_a_hit_do_not_count_as_free() -> None:
    pool = new_pool(3)
    cached(pool, (1, 2, 3, 4))
    pool._free.take(1)
    seq = Sequence(Request("r", (1, 2, 3, 4, 5), SamplingParams(), StopParams(8), 0.0), 1, 0, 0, (0.0, 0))
    assert pool.num_available == 2 and not pool.admit(seq, ROOT, 0)
    assert (pool.num_cached, pool.num_owned) == (2, 0)


def test_an_admission_leaves_a_block_for_each_running_sequence() -> None:
    seq = Sequence(Request("r", (1, 2, 3), SamplingParams(), StopParams(8), 0.0), 1, 0, 0, (0.0, 0))
    pool = new_pool(4)
    assert not pool.admit(seq, ROOT, 3)
    assert pool.admit(seq, ROOT, 2)


def test_a_shared_block_waits_for_the_work_of_each_that_let_go_of_it() -> None:
    pool = new_pool(4)
    first = admitted(pool, (1, 2, 3))
    pool.publish(first, 2)
    second = admitted(pool, (1, 2, 9))
    (shared,) = set(first.table.groups[0]) & set(second.table.groups[0])
    ticket = pool.fences.open()
    pool.release(first.table, ticket)
    # The last to let go has nothing in flight; the first still has.
    pool.release(second.table, 0)
    pool.forget_prefix(first)
    assert shared in pool._limbo and pool.num_limbo == 2 and pool.num_available == 2
    pool.fences.close(ticket)
    pool.open_limbo()
    pool.check()
    assert pool.num_free == 4


def test_a_block_that_is_hit_in_limbo_is_owned_when_the_work_on_it_is_over() -> None:
    pool = new_pool(4)
    first = admitted(pool, (1, 2, 3))
    pool.publish(first, 2)
    ticket = pool.fences.open()
    pool.release(first.table, ticket)
    assert (pool.num_limbo, pool.num_owned) == (2, 0)
    second = admitted(pool, (1, 2, 9))
    assert second.num_computed == 2
    pool.check()
    assert (pool.num_limbo, pool.num_owned) == (1, 2)
    pool.fences.close(ticket)
    pool.open_limbo()
    pool.check()
    assert (pool.num_limbo, pool.num_owned, pool.num_available) == (0, 2, 2)


def test_blocks_behind_a_window_leave_when_they_have_settled_and_are_found_again() -> None:
    plan = kv_plan(2, 0, 5)
    pool, ids = BlockPool(plan, 40, RadixIndex(plan), GrowOnDemand()), tuple(range(12))
    seq = admitted(pool, ids)
    pool.publish(seq, 12)
    seq.num_computed = 12
    assert seq.table.settle_at <= 12
    pool.settle(seq, 0)
    full, sliding = map(list, seq.table.groups)
    # The token at position 12 sees the keys at 8 ... 12.
    assert sliding[:4] == [0] * 4 and all(sliding[4:]) and all(full)
    assert (pool.num_owned, pool.num_cached) == (8, 4)
    pool.release(seq.table, 0)
    again = admitted(pool, (*ids, 99))
    assert again.num_computed == 12
    assert again.table.groups[0][:6] == full and again.table.groups[1][:6] == sliding
    assert pool.num_owned == 8 + 2
    pool.check()


def test_what_leaves_a_window_waits_for_the_work_that_touches_it() -> None:
    plan = kv_plan(2, 0, 1)
    pool = BlockPool(plan, 8, NoPrefixIndex(), GrowOnDemand())
    seq = admitted(pool, (1, 2, 3, 4))
    ticket = pool.fences.open()
    pool.slide(seq, 4, ticket)
    assert (pool.num_owned, pool.num_limbo) == (2, 2)
    pool.fences.close(ticket)
    pool.open_limbo()
    assert (pool.num_owned, pool.num_limbo, pool.num_free) == (2, 0, 6)
