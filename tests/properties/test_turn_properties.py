"""However much comes at a time, a turn of the engine's loop takes in a bounded share, in the order of its coming."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from photon_grpc.core.frames import Abort, Add, Control, Down
from photon_grpc.core.ports import Event
from photon_grpc.engine.arrivals import IDS_PER_ABORT, MAX_FRAMES, MAX_IDS
from photon_grpc.engine.engine import Engine
from tests.engine.harness import Harness, Setting
from tests.engine.tables import Table, TableMatcher
from tests.examples import examples

#: Anything but the end may follow, for ever.
ANYTHING = Table(({0: 0, 1: 0, 2: 0, 3: 0},), frozenset())

#: What comes, and how often: adds of so many ids (with a constraint, or a continuation under it), aborts of so many
#: handles, events that so many wait for, orders.
pieces = st.tuples(
    st.sampled_from(["add", "constrained", "continued", "abort", "event", "order"]),
    st.integers(1, 120),
    st.sampled_from([1, 200, 8_000]),
)


class Turns(Harness):
    """Counts what each turn takes in, and what is walked meanwhile."""

    def __init__(self) -> None:
        super().__init__(Setting(max_model_len=10_000, max_queue_size=100_000, num_blocks=4, max_num_seqs=2))
        self.taken: list[list[Down | Event]] = []
        self.num_walked = 0

    def put(self, kind: str, number: int, num_ids: int) -> None:
        name = f"{kind}{number}.{self._handles}"
        if kind == "abort":
            self.abort(*range(num_ids))
        elif kind == "order":
            self.post.put(Control(number, "abort_requests", ("nobody",)))
        elif kind == "event":
            self.post.wake(Event())
        else:
            table = None if kind == "add" else ANYTHING
            continued = (1,) * num_ids if kind == "continued" else ()
            prompt = [1] * (1 if continued else num_ids)
            self.add(prompt, num_ids + 1, table=table, request_id=name, continued_ids=continued)

    def turn(self) -> None:
        taken: list[Down | Event] = []
        receive, walk = Engine._receive, TableMatcher.accept

        def receiving(engine: Engine, frontend: int, frame: Down | Event, report: object) -> None:
            taken.append(frame)
            with patch.object(TableMatcher, "accept", walking):
                receive(engine, frontend, frame, report)  # type: ignore[arg-type]

        def walking(matcher: TableMatcher, token_id: int) -> bool:
            self.num_walked += 1
            return walk(matcher, token_id)

        with patch.object(Engine, "_receive", receiving):
            self.engine.step()
        self.taken.append(taken)


@given(st.lists(pieces, min_size=1, max_size=8))
@settings(max_examples=examples(40), deadline=None)
def test_a_turn_takes_in_a_bounded_share(many: list[tuple[str, int, int]]) -> None:
    turns, put = Turns(), 0
    for kind, count, num_ids in many:
        for number in range(count if num_ids < 8_000 else min(count, 12)):
            turns.put(kind, number, num_ids)
            put += 1
    waiting = list(turns.post.inbox)
    while sum(map(len, turns.taken)) < put:
        beats = len(turns.post.beats)
        turns.turn()
        taken = turns.taken[-1]
        assert len(taken) - num_aborts_of(taken) <= MAX_FRAMES
        assert num_aborts_of(taken) <= MAX_IDS // IDS_PER_ABORT
        assert sum(map(num_ids_of, taken[:-1])) < MAX_IDS
        assert len(turns.post.beats) - beats == len(taken) + 1, "the supervisor sees a sign of life behind each"
    assert len(turns.grammars.preparations) <= put and turns.num_walked == 0
    came = [frame for taken in turns.taken for frame in taken]
    assert [frame for _, frame in waiting] == came


def num_aborts_of(taken: list[Down | Event]) -> int:
    return sum(isinstance(frame, Abort) for frame in taken)


def test_requests_that_are_cancelled_together_end_together() -> None:
    turns = Turns()
    handles = [turns.add([1, 2, 3], 9, request_id=f"r{number}") for number in range(500)]
    for _ in range(-(-len(handles) // MAX_FRAMES)):
        turns.turn()
    for handle in handles:
        turns.abort(handle)
    turns.turn()
    assert not turns.engine.scheduler.live.has_work()


def num_ids_of(frame: Down | Event) -> int:
    if isinstance(frame, Add):
        return frame.request.num_given * frame.request.num_outputs
    return IDS_PER_ABORT * len(frame.handles) if isinstance(frame, Abort) else 0
