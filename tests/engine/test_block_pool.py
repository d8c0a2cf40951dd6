"""What the pool and its index promise to one another when something known is forgotten."""

from __future__ import annotations

from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.block_pool import BlockPool
from photon_grpc.engine.blocks.growth import GrowOnDemand
from photon_grpc.engine.blocks.prefix_index import RadixIndex

ROOT = (0, "", "")


def new_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, 2, RadixIndex(2), GrowOnDemand())


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
