"""Constraints as a table: an automaton over the remainder of an id divided by four, with matchers and grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from photon_grpc.core.ports import Event
from photon_grpc.core.request import Request
from photon_grpc.engine.constraints.grammar import Matcher, MatcherLost
from photon_grpc.errors import InvalidRequest

#: The id that ends an output where its state may be the last; every other id moves on by what is left of it.
END = 96
NUM_CLASSES = 4


@dataclass(frozen=True)
class Table:
    """`ways[state][id % 4]` is the next state; what has no entry may not follow. `final` states may be the last."""

    ways: tuple[dict[int, int], ...]
    final: frozenset[int]

    def _state(self, ids: Sequence[int]) -> int:
        state = 0
        for token in ids:
            state = self.ways[state][token % NUM_CLASSES]
        return state

    def allowed(self, ids: Sequence[int]) -> set[int]:
        """Return the ids that may follow these; none if these are not allowed themselves."""
        try:
            state = self._state(ids)
        except KeyError:
            return set()
        allowed = {token for token in range(END) if token % NUM_CLASSES in self.ways[state]}
        return allowed | {END} if state in self.final else allowed

    def is_complete(self, ids: Sequence[int]) -> bool:
        """Return whether only the end may follow."""
        return END not in ids and self.allowed(ids) == {END}


class Panic(BaseException):
    """As what a Rust library raises where it has a defect: no Exception."""


class TableMatcher:
    """A walk over a table.

    Args:
        table: what may follow.
        num_calls: so many methods work, every later one raises `end`.
    """

    def __init__(self, table: Table, num_calls: int | None = None, end: BaseException | None = None) -> None:
        self.ids: list[int] = []
        self._table = table
        self._num_calls = num_calls
        self._end = end or Panic("the matcher is broken")

    def walk(self, ids: list[int]) -> None:
        for at, token in enumerate(ids):
            if token not in self._table.allowed(self.ids):
                raise InvalidRequest(
                    f"continue_from.ids[{at}]: {token} may not follow", field=f"continue_from.ids[{at}]"
                )
            self.ids.append(token)

    def _call(self) -> None:
        if self._num_calls is not None:
            self._num_calls -= 1
            if self._num_calls < 0:
                raise self._end

    def fill(self, mask: memoryview) -> None:
        self._call()
        bits = sum(1 << token for token in self._table.allowed(self.ids))
        mask[:] = bits.to_bytes(len(mask), "little")

    def accept(self, token_id: int) -> bool:
        self._call()
        if token_id not in self._table.allowed(self.ids):
            return False
        self.ids.append(token_id)
        return True

    def advance(self, token_id: int) -> bool:
        return self.accept(token_id)

    def roll_back(self, num_tokens: int) -> None:
        self._call()
        assert 0 < num_tokens <= len(self.ids)
        del self.ids[-num_tokens:]

    def forced(self) -> tuple[int, ...]:
        """Return the least id of the only class, while there is one: what is drawn may be another of the class."""
        ids = list(self.ids)
        while len(ids) < len(self.ids) + 8:
            allowed = self._table.allowed(ids)
            if len({token % NUM_CLASSES for token in allowed}) != 1 or END in allowed:
                break
            ids.append(min(allowed))
        return tuple(ids[len(self.ids) :])

    @property
    def is_complete(self) -> bool:
        return self._table.is_complete(self.ids)


@dataclass
class OneByOne:
    """Fills one mask after the other."""

    matchers: Mapping[int, Matcher]
    mask_bytes: int

    def fill(self, masks: memoryview) -> dict[int, BaseException]:
        failures: dict[int, BaseException] = {}
        for at, matcher in self.matchers.items():
            try:
                matcher.fill(masks[at * self.mask_bytes : (at + 1) * self.mask_bytes])
            except BaseException as error:
                failures[at] = error
        return failures


class InTurn:
    """Fillers, counted."""

    num_fillers = 0

    def filler(self, matchers: Mapping[int, Matcher], mask_bytes: int) -> OneByOne:
        self.num_fillers += 1
        return OneByOne(matchers, mask_bytes)


@dataclass
class TablePreparation:
    """Matchers of a request's table, behind ids."""

    grammars: TableGrammars
    request: Request
    ids: tuple[int, ...]
    is_anew: bool
    is_cancelled: bool = False
    is_begun: bool = False

    def awaits(self) -> Event | None:
        if self.is_anew and self.request.request_id in self.grammars.next_turn and not self.is_begun:
            self.is_begun = True
            event = Event()
            self.grammars.next_turn[self.request.request_id](event)
            return event
        events = self.grammars.made_anew if self.is_anew else self.grammars.compiling
        return events.get(self.request.request_id)

    def matchers(self, num: int) -> list[TableMatcher]:
        name, grammars = self.request.request_id, self.grammars
        if name in grammars.broken:
            raise grammars.broken[name]
        return [self._behind_ids(TableMatcher(grammars.tables[name], *grammars.end_of(name))) for _ in range(num)]

    def cancel(self) -> None:
        self.is_cancelled = True

    def _behind_ids(self, matcher: TableMatcher) -> TableMatcher:
        stop = {*self.request.stop.eos_token_ids, *self.request.stop.stop_token_ids}
        matcher.walk([token for token in self.ids if token not in stop])
        return matcher


@dataclass
class TableGrammars(InTurn):
    """Grammars of requests by their ids."""

    tables: dict[str, Table] = field(default_factory=dict)
    #: Not compiled yet.
    compiling: dict[str, Event] = field(default_factory=dict)
    #: The matcher was lost and is not made again yet.
    made_anew: dict[str, Event] = field(default_factory=dict)
    #: The matcher is made again by the next turn, which is told so.
    next_turn: dict[str, Callable[[Event], None]] = field(default_factory=dict)
    #: What compiling ends with instead of a table.
    broken: dict[str, BaseException] = field(default_factory=dict)
    #: Calls after which matchers break.
    num_calls: dict[str, int] = field(default_factory=dict)
    #: Calls after which one matcher after the other is lost.
    losses: dict[str, list[int]] = field(default_factory=dict)
    preparations: list[TablePreparation] = field(default_factory=list)

    def prepare(self, request: Request, ids: tuple[int, ...], is_anew: bool) -> TablePreparation | None:
        name = request.request_id
        if not any(name in known for known in (self.tables, self.compiling, self.broken)):
            return None
        self.preparations.append(TablePreparation(self, request, ids, is_anew))
        return self.preparations[-1]

    def end_of(self, name: str) -> tuple[int | None, BaseException]:
        """How many calls the next matcher of this name lasts, and what it ends with."""
        if self.losses.get(name):
            return self.losses[name].pop(0), MatcherLost()
        return self.num_calls.get(name), Panic("the matcher is broken")
