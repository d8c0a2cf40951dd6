"""Owner of every block id. Books: free + cached + owned + limbo = total.

A block is *owned* while a table references it, *cached* while only the prefix index knows it (and then as good as free: it is evicted when
needed, and counted once), in *limbo* while nobody may have it because a step in flight still writes to it, else *free*.
Block 0 is reserved for padding and stands outside the books.
"""

from __future__ import annotations

from collections import deque

from photon_grpc.core.batch import Growth
from photon_grpc.core.kv import BlockTable, KVPlan
from photon_grpc.core.sequence import Sequence
from photon_grpc.engine.blocks.allocation import AllocationPolicy
from photon_grpc.engine.blocks.prefix_index import Parent, PrefixIndex

#: `BlockTable.publish_at` of a table that publishes no more.
NEVER = 1 << 62


class BlockPool:
    """Allocates, shares, frees behind a fence, evicts.

    Args:
        plan: the groups that a table holds a list of blocks for, and the arithmetic of blocks.
        num_blocks: blocks that requests may use: ids 1 ... num_blocks.
        index: what is known about the content of blocks.
        allocation: how much a sequence gets at admission.
    """

    def __init__(self, plan: KVPlan, num_blocks: int, index: PrefixIndex, allocation: AllocationPolicy) -> None:
        self.plan = plan
        self.num_blocks = num_blocks
        self.block_size = plan.block_size
        self.allocation = allocation
        self._index = index
        self._num_groups = len(plan.groups)
        self._free = allocation.store(num_blocks)
        self._references = [0] * (num_blocks + 1)
        #: Block -> the step that must settle first, and the same in order of release.
        self._limbo: dict[int, int] = {}
        self._fences: deque[tuple[int, int]] = deque()
        self._num_owned = 0

    # -- books -------------------------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._index.num_resting

    @property
    def num_owned(self) -> int:
        return self._num_owned

    @property
    def num_limbo(self) -> int:
        return len(self._limbo)

    @property
    def num_available(self) -> int:
        """What can be allocated now: free blocks and those that can be evicted."""
        return len(self._free) + self._index.num_resting

    def check(self) -> None:
        """Raises RuntimeError when the books do not balance."""
        owned = sum(1 for count in self._references[1:] if count)
        total = self.num_free + self.num_cached + owned + self.num_limbo
        if owned != self._num_owned or total != self.num_blocks or self._references[0]:
            raise RuntimeError(
                f"KV books do not balance: free {self.num_free} + cached {self.num_cached} + owned {owned} (counted {self._num_owned}) "
                f"+ limbo {self.num_limbo} != total {self.num_blocks}"
            )

    # -- allocation --------------------------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence, root: Parent, num_running: int) -> bool:
        """Gives a sequence without blocks what it needs to start: the longest known beginning, shared, and fresh blocks for the rest.

        Sets `seq.num_computed` to the tokens that need not be computed, at most all but one. False, and nothing taken, when there is
        no room.
        """
        hit = self._match(seq, root)
        needed = self.plan.blocks(self.allocation.tokens_at_admission(seq)) - len(hit)
        # What a hit wakes from rest is no longer there to be evicted: a resting block is never promised twice.
        waking = sum(1 for block in hit if not self._references[block] and block not in self._limbo)
        if needed + self.allocation.headroom(num_running) > self.num_available - waking:
            return False
        for block in hit:
            self._reference(block)
        table = self._fresh_table(seq, root)
        try:
            table.groups = (
                [[*hit, *self._take(needed // self._num_groups)]] if self._num_groups == 1 else self._per_group(needed)
            )
        except IndexError:
            # No run is long enough; where runs are wanted nothing is shared, so nothing was taken.
            return False
        table.capacity = len(table.groups[0]) * self.block_size
        self._continue_chain(table, hit)
        seq.table = table
        seq.num_computed = len(hit) * self.block_size
        return True

    def fork(self, seq: Sequence, leader: Sequence, num_running: int) -> tuple[tuple[int, int], ...] | None:
        """Gives `seq` the leader's prompt but for its last token: whole blocks shared, the partial one to be copied.

        Returns the copies (source, destination), or None when there is no room. A shared block is never written: writes begin behind
        the last whole shared block, in a block of the sequence's own.
        """
        num_tokens = seq.num_prompt - 1
        whole = num_tokens // self.block_size
        shared = [group[:whole] for group in leader.table.groups]
        needed = self.plan.blocks(self.allocation.tokens_at_admission(seq)) - whole * self._num_groups
        if needed + self.allocation.headroom(num_running) > self.num_available:
            return None
        table = self._fresh_table(seq, leader.table.root)
        own = needed // self._num_groups
        for group in shared:
            for block in group:
                self._reference(block)
        table.groups = [[*group, *self._take(own)] for group in shared]
        table.capacity = (whole + own) * self.block_size
        self._continue_chain(table, [block for block in shared[0] if self._index.knows(block)])
        seq.table = table
        seq.num_computed = num_tokens
        if num_tokens == whole * self.block_size:
            return ()
        return tuple(
            (theirs[whole], ours[whole]) for theirs, ours in zip(leader.table.groups, table.groups, strict=True)
        )

    def grow(self, seq: Sequence, num_tokens: int) -> list[Growth] | None:
        """Extends the table to hold `num_tokens`. None, and nothing taken, when there is no room."""
        table = seq.table
        missing = self.plan.columns(num_tokens - table.capacity)
        if missing * self._num_groups > self.num_available:
            return None
        grown = []
        for number, group in enumerate(table.groups):
            blocks = self._take(missing)
            grown.append(Growth(seq.slot, number, len(group), tuple(blocks)))
            group.extend(blocks)
        table.capacity += missing * self.block_size
        return grown

    def limbo_covers(self, num_tokens: int, seq: Sequence) -> bool:
        """Whether waiting for the steps in flight will free enough to hold `num_tokens` of `seq`."""
        return self.plan.blocks(num_tokens - seq.table.capacity) <= self.num_available + self.num_limbo

    def release(self, table: BlockTable, fence: int) -> None:
        """Takes all blocks back; those that nobody else references wait until step `fence` has settled (0: none is in flight)."""
        for group in table.groups:
            # From the end, so that what rests longest is a leaf of the index.
            for block in reversed(group):
                self._dereference(block, fence)
            group.clear()
        table.capacity = 0
        table.publish_at = NEVER

    def settled(self, step: int) -> None:
        """Opens the fences up to `step`."""
        while self._fences and self._fences[0][0] <= step:
            fence, block = self._fences.popleft()
            if self._limbo.get(block) == fence:
                del self._limbo[block]
                self._give_back(block)

    # -- prefixes ----------------------------------------------------------------------------------------------------------------------

    def publish(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Makes the whole blocks within the first `num_tokens` known; their content is computed by now or by a step in flight.
        Returns those that became known."""
        table, size = seq.table, self.block_size
        published: list[int] = []
        if table.tail is not table.root and not self._index.knows(table.tail):
            # It was forgotten meanwhile; what hangs from it would be found below whatever the block holds next.
            table.publish_at = NEVER
        while table.publish_at <= num_tokens:
            end = table.publish_at
            block = table.groups[0][end // size - 1]
            if self._index.publish(table.tail, seq.ids[end - size : end], block):
                table.tail = block
                table.publish_at += size
                published.append(block)
            else:
                # Another block is that already; hanging ours below a block that we do not hold could outlive it.
                table.publish_at = NEVER
        return published

    def forget(self, blocks: set[int]) -> set[int]:
        """Forgets these blocks and all that hang from them: the step that was to fill them failed. Returns what was forgotten."""
        gone = self._index.forget(blocks)
        self._reclaim(gone)
        return gone

    def forget_prefix(self, seq: Sequence) -> None:
        """Forgets every block that the beginning of `seq` could be found in, and all that hang from them."""
        self.forget(set(self._index.match(seq.table.root, seq.ids, len(seq.ids))))

    def reset_prefixes(self) -> int:
        """Forgets everything known; returns how many blocks became free. Those in use are only forgotten."""
        before = len(self._free)
        while self._index.num_resting:
            self._reclaim(self._index.evict())
        freed = len(self._free) - before
        self._index.forget({block for block, count in enumerate(self._references) if count or block in self._limbo})
        return freed

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _match(self, seq: Sequence, root: Parent) -> list[int]:
        if seq.request.bypass_prefix_cache or not self.allocation.may_share:
            return []
        return self._index.match(root, seq.ids, len(seq.ids) - 1)

    def _fresh_table(self, seq: Sequence, root: Parent) -> BlockTable:
        table = BlockTable(self._num_groups)
        table.root = table.tail = root
        table.publish_at = NEVER if seq.request.bypass_prefix_cache or self._num_groups > 1 else self.block_size
        return table

    def _continue_chain(self, table: BlockTable, known: list[int]) -> None:
        if known and table.publish_at != NEVER:
            table.tail = known[-1]
            table.publish_at = (len(known) + 1) * self.block_size

    def _per_group(self, needed: int) -> list[list[int]]:
        return [self._take(needed // self._num_groups) for _ in range(self._num_groups)]

    def _take(self, count: int) -> list[int]:
        while len(self._free) < count and self._index.num_resting:
            self._reclaim(self._index.evict())
        blocks = self._free.take(count)
        for block in blocks:
            self._references[block] = 1
        self._num_owned += count
        return blocks

    def _reclaim(self, forgotten: set[int]) -> None:
        for block in forgotten:
            if not self._references[block] and block not in self._limbo:
                self._free.put(block)

    def _reference(self, block: int) -> None:
        if not self._references[block]:
            self._num_owned += 1
            if self._limbo.pop(block, None) is None:
                self._index.wake(block)
        self._references[block] += 1

    def _dereference(self, block: int, fence: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        self._num_owned -= 1
        if fence:
            self._limbo[block] = fence
            self._fences.append((fence, block))
        else:
            self._give_back(block)

    def _give_back(self, block: int) -> None:
        if self._index.knows(block):
            self._index.rest(block)
        else:
            self._free.put(block)
