"""Which planes sums use: no rank writes where another has not taken what was there, whatever the ranks' speed.

The operations are those that `Planes` launches; streams and memory are simulated, with any order that they allow.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.kernels.linear import exchange
from photon_grpc.kernels.linear.exchange import NUM_PUSHED
from photon_grpc.layers.epilogues import Parts
from photon_grpc.layers.parallel import planes
from photon_grpc.layers.parallel.planes import NUM_SENT, Planes

#: Rows of a piece, and the first plane for pieces behind those for few rows.
PIECE, FIRST_SENT = 1024, exchange.NUM_PLANES
#: Where a rank is: what its main stream and its copies still have to do, in order.
Operation = tuple[str, int, tuple[int, int]]


class Recorded(Planes):
    """Planes that note what they would launch: ("make" | "push" | "send" | "take", plane, (sum, first row))."""

    def __init__(self) -> None:
        self.main: deque[Operation] = deque()
        self.copies: deque[Operation] = deque()
        self.number, self.row = 0, 0
        self._few, self._many, self._rank = (0, 1), range(2 * NUM_SENT), 0
        self.piece_rows = PIECE

    def run(self, num_rows: int, site: int, *, may_wait: bool) -> None:
        def of(rows: slice) -> torch.Tensor:
            self.row = rows.start or 0
            self.main.append(("make", -1, (self.number, self.row)))
            return torch.empty(0)

        h, pending = torch.empty(num_rows, 1), [] if site == 0 and may_wait else None
        self.add(h, Parts(of), None, h, site, pending)
        for _, take in pending or ():
            take()
        self.number += 1

    def launch(self, *sums: Any, pushes: bool = True) -> None:
        plane = sums[4]
        if pushes:
            self.main.append(("push", plane, (self.number, 0)))
        self.main.append(("take", plane, (self.number, 0)))

    def _send(self, part: torch.Tensor, plane: int, main: Any) -> None:
        self.copies.append(("send", FIRST_SENT + plane, (self.number, self.row)))
        self.main.append(("made", FIRST_SENT + plane, (self.number, self.row)))

    def _take(self, sums: Any, plane: int, main: Any) -> None:
        (h, *_) = sums
        self.main.append(("take", FIRST_SENT + plane, (self.number, h.storage_offset())))


def operations(sums: list[int], *, may_wait: bool) -> Recorded:
    found = Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes, "stream_of", lambda device: None)
        patch.setattr(exchange, "launch", found.launch)
        for number, num_rows in enumerate(sums):
            found.run(num_rows, number % 2, may_wait=may_wait)
    return found


def simulate(ranks: list[Recorded], chance: random.Random) -> None:
    """Run all operations in a random order that streams allow; fail where a word is written before it was taken."""
    size = len(ranks)
    memory: dict[tuple[int, int, int], tuple[int, int]] = {}
    made: list[set[tuple[int, int]]] = [set() for _ in ranks]
    gone: list[set[tuple[int, int]]] = [set() for _ in ranks]

    def write(rank: int, plane: int, what: tuple[int, int]) -> None:
        for other in set(range(size)) - {rank}:
            assert (other, plane, rank) not in memory, f"{what} is written over {memory[other, plane, rank]}"
            memory[other, plane, rank] = what

    def step(rank: int, queue: deque[Operation]) -> bool:
        kind, plane, what = queue[0]
        others = [(rank, plane, other) for other in range(size) if other != rank]
        if kind == "send" and what not in made[rank]:
            return False
        if kind == "take" and (plane >= FIRST_SENT and what not in gone[rank]):
            return False
        if kind == "take" and not all(each in memory for each in others):
            return False
        if kind in ("send", "push"):
            write(rank, plane, what)
            gone[rank].add(what)
        elif kind == "take":
            assert all(memory.pop(each) == what for each in others)
        elif kind == "made":
            made[rank].add(what)
        queue.popleft()
        return True

    while queues := [(at, queue) for at, rank in enumerate(ranks) for queue in (rank.main, rank.copies) if queue]:
        chance.shuffle(queues)
        assert any(step(*queue) for queue in queues), "every rank waits for another"
    assert not memory


ROWS = st.sampled_from([1, NUM_PUSHED, NUM_PUSHED + 1, PIECE + 1, 3 * PIECE, 4 * PIECE, 9 * PIECE - 1])


@given(
    st.lists(ROWS, min_size=1, max_size=8), st.integers(2, 4), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
def test_no_part_is_written_over_another(sums: list[int], size: int, may_wait: bool, seed: int) -> None:
    """`may_wait`: what follows attention's sum takes its pieces one by one."""
    simulate([operations(sums, may_wait=may_wait) for _ in range(size)], random.Random(seed))


@pytest.mark.parametrize(("size", "has_pieces"), [(2, True), (4, False)])
def test_more_than_two_ranks_send_no_pieces(size: int, has_pieces: bool) -> None:
    found = Planes.__new__(Planes)
    word = torch.empty((), dtype=torch.int32)
    found._few = [(word.expand(size - 1, NUM_PUSHED, 16),) * size] * exchange.NUM_PLANES
    found._many = found._few if exchange.sends_pieces(size) else []
    found._rank = 0
    rows = torch.empty(NUM_PUSHED + 1, 16)
    assert found.take(rows[1:]) and found.take(rows) is has_pieces
    assert not found.take(rows[:, 1:])


@given(st.integers(NUM_PUSHED + 1, 40_000))
def test_pieces_are_all_rows_in_order_and_fit_into_planes(num_rows: int) -> None:
    found = list(planes.pieces(num_rows, PIECE))
    assert [row for rows in found for row in range(num_rows)[rows]] == list(range(num_rows))
    assert all(0 < rows.stop - rows.start <= PIECE for rows in found) and len(found) > 1
    # The library multiplies few rows by other kernels than many.
    assert min(rows.stop - rows.start for rows in found) > 128
