"""Pages without tensors: every block is a list of cells that hold the id written there."""

from __future__ import annotations

from collections.abc import Sequence

from photon_grpc.core.kv import KVPlan

#: In a cell: what was written there is no number.
NAN = -3
#: Read where groups hold different ids for one position, or written by a row that read another sequence's.
WRONG = -4

#: Per KVGroup, the blocks of one sequence.
Tables = Sequence[Sequence[int]]


class Pages:
    """Pages in which a token is written in every group, and windows limit what a row reads through its table."""

    def __init__(self, plan: KVPlan, num_blocks: int) -> None:
        self._plan = plan
        self._size = plan.block_size
        self._cells = [[-1] * plan.block_size for _ in range(num_blocks + 1)]

    def copy(self, source: int, destination: int) -> None:
        self._cells[destination] = list(self._cells[source])

    def columns(self, first: int, last: int) -> slice:
        """Of the blocks that hold the positions first ... last."""
        return slice(first // self._size, last // self._size + 1)

    def write(self, tables: Tables, position: int, token: int) -> None:
        for table in tables:
            self._cells[table[position // self._size]][position % self._size] = token

    def attend(self, tables: Tables, ids: Sequence[int], position: int) -> None:
        """Spoils what was written at `position` if a window shows it other ids than those of its row."""
        for table, group in zip(tables, self._plan.groups, strict=True):
            window = self._window(table, group.window, position) if group.window else []
            own = ids[position + 1 - len(window) : position + 1]
            if any(token not in (NAN, expected) for token, expected in zip(window, own, strict=True)):
                self.write(tables, position, WRONG)

    def read(self, tables: Tables, ids: Sequence[int]) -> list[int]:
        """Return what the row whose newest token is the last of `ids` sees of them.

        NAN and WRONG are returned as written, and the id itself where no group looks.
        """
        seen: list[set[int]] = [set() for _ in ids]
        for table, group in zip(tables, self._plan.groups, strict=True):
            window = self._window(table, group.window, len(ids) - 1)
            for position, token in enumerate(window, len(ids) - len(window)):
                seen[position].add(token)
        return [self._one(tokens or {token}) for tokens, token in zip(seen, ids, strict=True)]

    def _window(self, table: Sequence[int], window: int, position: int) -> list[int]:
        first = max(0, position - window + 1) if window else 0
        return [self._cells[table[at // self._size]][at % self._size] for at in range(first, position + 1)]

    @staticmethod
    def _one(tokens: set[int]) -> int:
        if NAN in tokens:
            return NAN
        return tokens.pop() if len(tokens) == 1 else WRONG
