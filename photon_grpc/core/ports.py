"""Protocols in which siblings meet: the engine knows a Runner only by this, a front end its engine only by that.
`compose` joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.frames import Down, Facts, Up
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.stats import Load


class Pending(Protocol):
    """A launched step. Where its Batch has masked rows the draw of all rows is held back until `sample`.

    Called in the order below, every method raises only when the device is lost: then nothing in this process can
    compute any more. Whatever else fails is a fault of the rows in `result`. Out of order, InternalFailure is raised.
    """

    def drafts(self) -> tuple[int, ...]:
        """Drafts of the masked rows: `batch.drafts` ids for each in Batch order, -1 where a row has fewer. () where
        nothing is drafted or the launch failed. Waits for the drafts only, not for the step."""

    def sample(self, masks: memoryview) -> None:
        """Launch what was held back and return at once; called once, before `result` and the next `submit`, and only if
        `batch.masked`.

        Args:
            masks: which ids may be drawn, `batch.drafts + 1` bitmasks for each masked row in Batch order: mask j is for
                the id behind j drafts. A bitmask is ceil(vocab_size / 32) little-endian words of 32 bits: bit i of word
                w stands for id 32 w + i (the layout of llguidance and XGrammar). The caller leaves it unchanged
                until the step is read.
        """

    def result(self) -> StepOutput:
        """Wait for the step."""


class RunnerFacts(Protocol):
    """Sizes that the engine plans with."""

    @property
    def num_blocks(self) -> int:
        """Blocks that requests may use: ids 1 ... num_blocks. Block 0 is reserved for padding."""

    @property
    def kv(self) -> KVPlan: ...

    @property
    def depth(self) -> int:
        """Steps that may stay unread when the next is launched: 0 on a CPU, 1 on CUDA."""


class Runner(RunnerFacts, Protocol):
    """Computes Batches in the order of submission."""

    def submit(self, batch: Batch) -> Pending:
        """Launch one step and return at once (with depth 0: when it is computed as far as it can be without masks).

        Raise only when the device is lost, or InternalFailure where the step before waits for its masks; a launch that
        fails otherwise is a fault of every row in the result.
        """

    def close(self) -> None: ...


class Event:
    """Something that sequences wait for and another thread of the engine's process does: a grammar is compiled. Equal
    to itself only."""

    __slots__ = ()


class Inbox(Protocol):
    """The engine's end of the bridge, downward."""

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down | Event]]:
        """(front end, frame) pairs that came; waits up to `timeout_s` for the first, None: for ever, 0: not at all.

        An Event comes as the frame of front end -1. May come back with nothing sooner, so that the loop of the engine
        shows that it goes on.
        """

    def wake(self, event: Event) -> None:
        """Says that `event` has happened: a `drain` that waits comes back with it, else the next one brings it. From
        any thread; never waits, never raises."""


class Outbox(Protocol):
    """The engine's end of the bridge, upward."""

    def send(self, frontend: int, frame: Up) -> None:
        """Queue one frame. Never blocks on a stalled front end and never raises."""

    def broadcast(self, load: Load) -> None:
        """The same for every front end there is; one that comes later gets the newest, after the Facts."""


class Heartbeat(Protocol):
    """Signs of life of a loop."""

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        """The loop goes on, and will say so again within `allowance_s`; meanwhile `num_tokens` are computed. Never
        waits."""


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The engine's end of the bridge, and the watcher of its loop."""

    inbox: Inbox
    outbox: Outbox
    heartbeat: Heartbeat
    #: Front ends are told the Load on change, at most this often.
    load_interval_s: float = 0.1


class FlightRecorder(Protocol):
    """A trace of the requests in the steps in flight, which outlives the engine's process. Never waits."""

    def receiving(self, fingerprint: bytes) -> None:
        """This request is being taken in, until `received`."""

    def received(self) -> None: ...

    def seated(self, slot: int, since_step: int, fingerprint: bytes) -> None:
        """The slot is given to this request. `since_step`: the step of the seat less the tokens of its output, so that
        none of its steps has more of them than lie between; negative where the output began in an earlier engine."""

    def launching(self, step: int, slots: tuple[int, ...]) -> None:
        """Before a step is launched that computes these slots."""

    def settled(self, step: int) -> None:
        """This step and all before it were read and dealt with."""

    def remember(self, known: bytes) -> None:
        """For the next engine; takes the place of what was remembered before. Raises ValueError above 1 MiB."""


class EngineLink(Protocol):
    """A front end's end of the bridge; all calls and call-backs belong to its event loop."""

    @property
    def facts(self) -> Facts | None:
        """None while no engine is ready."""

    def send(self, frame: Down) -> None:
        """Raise errors.EngineRestarting or errors.ModelLoading when there is no engine, errors.QueueFull where it has
        long not read: an Add is not sent then. An Abort always is."""

    def listen(self, on_frame: Callable[[Up], None], on_lost: Callable[[], None]) -> None:
        """`on_frame` gets every frame up, `on_lost` is called when the engine is gone: everything in flight has
        failed."""
