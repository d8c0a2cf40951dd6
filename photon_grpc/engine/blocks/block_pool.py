"""The owner of every block id, with the invariant free + cached + owned + limbo = total.

A block is *owned* while a table references it. It is *cached* while only the prefix index knows it, and is evicted when
it is needed. It is in *limbo* while it must not be reused because work in flight still touches it. Otherwise it is
*free*. Block 0 is reserved for padding and not counted; in a table it stands for blocks that a window has passed.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from itertools import chain

from photon_grpc.core.batch import Growth
from photon_grpc.core.kv import NEVER, BlockTable, KVPlan, PrefixNode
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.allocation import AllocationPolicy
from photon_grpc.engine.blocks.fences import Fences, Limbo
from photon_grpc.engine.blocks.prefix_index import PrefixIndex


class BlockPool:
    """Allocates, shares, frees and evicts blocks.

    Args:
        plan: the groups, for each of which a table has a list of blocks, and the arithmetic of blocks.
        num_blocks: blocks that requests may use, with ids 1 ... num_blocks, in all groups.
        index: knows the content of blocks.
        allocation: decides how much a sequence gets at admission.
    """

    def __init__(self, plan: KVPlan, num_blocks: int, index: PrefixIndex, allocation: AllocationPolicy) -> None:
        self.plan = plan
        self.num_blocks = num_blocks
        self.block_size = plan.block_size
        self.allocation = allocation
        #: Tickets of the steps in flight.
        self.fences = Fences()
        self._index = index
        self._windows = [group.window for group in plan.groups]
        self._free = allocation.store(num_blocks)
        self._references = [0] * (num_blocks + 1)
        self._limbo = Limbo(self.fences)
        #: Referenced block -> newest fence of the sequences that have released it.
        self._fence_of_owned: dict[int, int] = {}
        self._num_owned = 0

    # -- accounting ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._index.num_unused

    @property
    def num_owned(self) -> int:
        return self._num_owned

    @property
    def num_limbo(self) -> int:
        return len(self._limbo)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones and evictable ones."""
        return len(self._free) + self._index.num_unused

    def check(self) -> None:
        """Raise RuntimeError if the counts of blocks do not add up."""
        owned = sum(1 for count in self._references[1:] if count)
        total = self.num_free + self.num_cached + owned + self.num_limbo
        if owned != self._num_owned or total != self.num_blocks or self._references[0]:
            raise RuntimeError(
                f"KV books do not balance: free {self.num_free} + cached {self.num_cached} + "
                f"owned {owned} (counted {self._num_owned}) "
                f"+ limbo {self.num_limbo} != total {self.num_blocks}"
            )

    def num_known(self, seq: Sequence, root: Hashable) -> int:
        """Return the tokens of `seq` that `admit` would find in the prefix cache."""
        return len(self._match(seq, root, sys.maxsize)) * self.block_size

    # -- allocation ----------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence, root: Hashable, num_running: int, max_cached: int = sys.maxsize) -> bool:
        """Give a sequence its first blocks: shared ones for the longest known prefix, and new ones for the rest.

        The prefix has at most `max_cached` tokens and leaves at least one to compute; `seq.num_computed` is set to it.
        Return False, and take nothing, if there is no room.
        """
        path = self._match(seq, root, max_cached)
        num_tokens = len(path) * self.block_size
        hit = [
            self._seen([node.blocks[group] for node in path], group, num_tokens) for group in range(len(self._windows))
        ]
        # A cached block that the hit will reference cannot also be evicted for this sequence.
        waking = sum(
            1 for group in hit for block in group if block and not self._references[block] and block not in self._limbo
        )
        if not self._allocate_table(seq, root, hit, waking, num_running):
            return False
        if path:
            self._continue_chain(seq.table, path[-1])
        seq.num_computed = num_tokens
        return True

    def fork(self, seq: Sequence, leader: Sequence, num_running: int) -> tuple[tuple[int, int], ...] | None:
        """Give `seq` the leader's prompt without its last token: whole blocks shared, the partial ones copied.

        Return the copies (source, destination), or None if there is no room. A shared block is never written: writes
        begin after the last whole shared block, in a block of `seq`. If the leader's window has passed parts of the
        prompt, do the same as `admit`.
        """
        num_tokens = seq.num_prompt - 1
        whole, needed = self.plan.whole(num_tokens), self.plan.columns(num_tokens)
        sources = [self._seen(table[:needed], group, num_tokens) for group, table in enumerate(leader.table.groups)]
        if not all(
            all(blocks[self.plan.behind(window, num_tokens) :])
            for blocks, window in zip(sources, self._windows, strict=True)
        ):
            return () if self.admit(seq, leader.table.root, num_running) else None
        if not self._allocate_table(seq, leader.table.root, [blocks[:whole] for blocks in sources], 0, num_running):
            return None
        node = leader.table.tail
        while node is not None and (node.depth > whole or not node.is_known):
            node = node.parent
        if node is not None and node.depth:
            self._continue_chain(seq.table, node)
        seq.num_computed = num_tokens
        return tuple(
            (theirs[whole], ours[whole])
            for theirs, ours in zip(sources, seq.table.groups, strict=True)
            if needed > whole
        )

    def grow(self, seq: Sequence, num_tokens: int) -> list[Growth] | None:
        """Extend the table to hold `num_tokens`. Return None, and take nothing, if there is no room."""
        table, columns = seq.table, self.plan.columns(num_tokens)
        if self._num_missing(table, columns) > self.num_available:
            return None
        grown = []
        for number, group in enumerate(table.groups):
            if len(group) < columns:
                blocks = self._take(columns - len(group))
                grown.append(Growth(seq.slot, number, len(group), tuple(blocks)))
                group.extend(blocks)
        table.capacity = columns * self.block_size
        return grown

    def waiting_covers(self, num_tokens: int, seq: Sequence) -> bool:
        """Return whether the steps in flight will free enough blocks to hold `num_tokens` of `seq`.

        This includes the blocks that its own windows will have passed when its flights settle, but none that a transfer
        holds, which may take long.
        """
        sliding = sum(
            1
            for window, group in zip(self._windows, seq.table.groups, strict=True)
            for block in group[: self.plan.behind(window, seq.num_launched)]
            if block and not self._limbo.is_named(block)
        )
        missing = self._num_missing(seq.table, self.plan.columns(num_tokens))
        return missing <= self.num_available + self._limbo.num_behind_steps + sliding

    def _num_missing(self, table: BlockTable, columns: int) -> int:
        """Return the blocks that the table lacks to have this many columns in every group."""
        return sum(max(0, columns - len(group)) for group in table.groups)

    def release(self, table: BlockTable, fence: int, *, of_session: bool = False) -> None:
        """Take all blocks back.

        Args:
            table: loses its blocks.
            fence: the newest ticket that touches them, for which blocks without another reference wait; 0 for none.
            of_session: evict the known blocks later.
        """
        if of_session:
            self._index.keep(chain.from_iterable(table.groups))
        # From the end, so that the least recently used block is a leaf of the index.
        for column in reversed(range(max(map(len, table.groups), default=0))):
            for group in table.groups:
                if column < len(group) and group[column]:
                    self._dereference(group[column], fence)
        table.groups = []
        table.capacity = 0
        table.publish_at = table.slide_at = table.settle_at = NEVER

    def open_limbo(self) -> None:
        """Free the blocks in limbo that nothing touches any more."""
        for block in self._limbo.opened():
            self._give_back(block)

    def open_transfer(self, blocks: Iterable[int]) -> int:
        """Keep these owned or cached blocks as they are until `close_transfer`; return the ticket of the transfer.

        It holds back these blocks alone, however long it takes.
        """
        named = set(blocks)
        for block in named:
            if not self._references[block] and block not in self._limbo:
                # Not evicted, but found by its ids.
                self._index.mark_used(block)
                self._limbo.put(block, 0)
        return self._limbo.open_transfer(named)

    def close_transfer(self, ticket: int) -> None:
        """Free the blocks that waited for this transfer alone."""
        for block in self._limbo.close_transfer(ticket):
            self._give_back(block)

    # -- settled tokens ------------------------------------------------------------------------------------------------

    def settle(self, seq: Sequence, fence: int) -> None:
        """Publish and release blocks for `seq.num_computed` settled tokens; needed from `seq.table.settle_at` on."""
        self.publish(seq, seq.num_computed)
        self.slide(seq, seq.num_computed, fence)

    def slide(self, seq: Sequence, num_settled: int, fence: int) -> None:
        """Take back the blocks that tokens from position `num_settled` on do not attend to; `fence` as in `release`."""
        table = seq.table
        if num_settled < table.slide_at:
            return
        for window, group in zip(self._windows, table.groups, strict=True):
            for column in reversed(range(self.plan.behind(window, num_settled))):
                if not group[column]:
                    break
                self._dereference(group[column], fence)
                group[column] = 0
        self._set_marks(table, num_settled)

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def publish(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Make the whole blocks of the first `num_tokens` known; return those that became known.

        Their content is computed already, or by a step in flight.
        """
        table, size = seq.table, self.block_size
        published: list[int] = []
        if table.tail is not None and not table.tail.is_known:
            # The parent was forgotten meanwhile, so its children could not be found.
            table.publish_at = NEVER
        while table.publish_at <= num_tokens:
            end = table.publish_at
            column = self.plan.whole(end) - 1
            blocks = [group[column] for group in table.groups]
            node = self._index.publish(table.root, table.tail, seq.ids[end - size : end], blocks)
            if node is None:
                # Other blocks are known as these ids. Below them ours could be forgotten at any time, as this sequence
                # does not hold them.
                table.publish_at = NEVER
            else:
                table.tail = node
                table.publish_at += size
                published += filter(self._index.knows, blocks)
        table.settle_at = min(table.publish_at, table.slide_at)
        return published

    def forget(self, blocks: set[int]) -> set[int]:
        """Forget these blocks, which a failed step was to fill, and their subtrees; return all forgotten blocks."""
        gone = self._index.forget(blocks)
        self._reclaim(gone)
        return gone

    def forget_prefix(self, seq: Sequence) -> None:
        """Forget all known prefixes that share their first block with `seq`."""
        self._reclaim(self._index.forget_beginning(seq.table.root, seq.ids))

    def reset_prefixes(self) -> int:
        """Forget all prefixes; return how many blocks became free. Blocks in use stay in use."""
        before = len(self._free)
        while self._index.num_unused:
            self._reclaim(self._index.evict())
        freed = len(self._free) - before
        self._index.forget({block for block, count in enumerate(self._references) if count or block in self._limbo})
        return freed

    # -- inside --------------------------------------------------------------------------------------------------------

    def _match(self, seq: Sequence, root: Hashable, max_cached: int) -> list[PrefixNode]:
        if seq.request.bypass_prefix_cache or not self.allocation.may_share:
            return []
        return self._index.match(root, seq.ids, min(len(seq.ids) - 1, max_cached))

    def _seen(self, blocks: list[int], group: int, num_tokens: int) -> list[int]:
        """Return the blocks of one group that a sequence needs after `num_tokens`, 0 for those before the window."""
        behind = self.plan.behind(self._windows[group], num_tokens)
        return [0] * behind + blocks[behind:] if behind else blocks

    def _allocate_table(
        self, seq: Sequence, root: Hashable, shared: list[list[int]], waking: int, num_running: int
    ) -> bool:
        """Give `seq` a table of `shared` blocks followed by new ones. Return False, and take nothing, without room."""
        num_tokens, num_shared = self.allocation.tokens_at_admission(seq), len(shared[0])
        own = [
            self.plan.at_admission(window, num_shared * self.block_size, num_tokens) - num_shared
            for window in self._windows
        ]
        room = self.num_available - waking
        if sum(own) + self.allocation.headroom(num_running) * len(own) > room:
            return False
        for group in shared:
            for block in group:
                if block:
                    self._reference(block)
        try:
            groups = [[*group, *self._take(count)] for group, count in zip(shared, own, strict=True)]
        except IndexError:
            # No run is long enough. Runs share nothing and need a plan of one group (windows are refused at startup),
            # so nothing was taken.
            return False
        seq.table = self._fresh_table(seq, root, groups)
        return True

    def _fresh_table(self, seq: Sequence, root: Hashable, groups: list[list[int]]) -> BlockTable:
        table = BlockTable()
        table.root, table.groups = root, groups
        table.capacity = min(map(len, groups)) * self.block_size
        table.publish_at = NEVER if seq.request.bypass_prefix_cache else self.block_size
        self._set_marks(table, 0)
        return table

    def _continue_chain(self, table: BlockTable, tail: PrefixNode) -> None:
        if table.publish_at != NEVER:
            table.tail = tail
            table.publish_at = (tail.depth + 1) * self.block_size
            self._set_marks(table, 0)

    def _set_marks(self, table: BlockTable, num_settled: int) -> None:
        table.slide_at = min(
            self.plan.slides_at(window, self.plan.behind(window, num_settled)) for window in self._windows
        )
        table.settle_at = min(table.publish_at, table.slide_at)

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count and self._index.num_unused:
            self._reclaim(self._index.evict())
        blocks = self._free.take(count)
        for block in blocks:
            self._references[block] = 1
        self._num_owned += count
        return blocks

    def _reclaim(self, forgotten: Iterable[int]) -> None:
        for block in forgotten:
            if not self._references[block] and block not in self._limbo:
                self._free.put(block)

    def _reference(self, block: int) -> None:
        if not self._references[block]:
            self._num_owned += 1
            fence = self._limbo.take(block)
            if fence is None:
                self._index.mark_used(block)
            elif fence:
                self._fence_of_owned[block] = fence
        self._references[block] += 1

    def _dereference(self, block: int, fence: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            if fence:
                self._fence_of_owned[block] = max(fence, self._fence_of_owned.get(block, 0))
            return
        self._num_owned -= 1
        if self._fence_of_owned:
            fence = max(fence, self._fence_of_owned.pop(block, 0))
        if self._limbo.is_touched(block, fence):
            self._limbo.put(block, fence)
        else:
            self._give_back(block)

    def _give_back(self, block: int) -> None:
        if self._index.knows(block):
            self._index.mark_unused(block)
        else:
            self._free.put(block)
