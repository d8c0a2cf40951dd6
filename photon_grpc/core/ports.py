"""Protocols between packages that may not import each other, such as engine and runner. `compose` connects them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from photon_grpc.core.batch import Batch, StepOutput
from photon_grpc.core.frames import Down, Facts, Up
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.stats import Load


class Pending(Protocol):
    """A launched step. If its Batch has masked rows, no row is sampled before `sample` is called.

    The methods are called in the order below; in another order they raise InternalFailure. Otherwise they raise only
    when the device is lost, after which nothing in this process can compute. Any other failure is a fault of its rows
    in `result`.
    """

    def drafts(self) -> tuple[int, ...]:
        """Return the drafts of the masked rows: `batch.drafts` ids for each in Batch order, padded with -1.

        Return () if nothing is drafted or the launch failed. Wait for the drafts only, not for the step.
        """

    def sample(self, masks: memoryview) -> None:
        """Launch sampling and return at once.

        Called once, before `result` and the next `submit`, and only if `batch.masked`.

        Args:
            masks: the ids that may be sampled: `batch.drafts + 1` bitmasks for each masked row in Batch order. Mask j
                is for the id after j drafts. A bitmask is ceil(vocab_size / 32) little-endian words of 32 bits; bit i
                of word w stands for id 32 w + i (the layout of llguidance and XGrammar). The caller leaves them
                unchanged until the step is read.
        """

    def result(self) -> StepOutput:
        """Wait for the step and return its output."""


class RunnerFacts(Protocol):
    """Sizes that the engine plans with."""

    @property
    def num_blocks(self) -> int:
        """Blocks that requests may use: ids 1 ... num_blocks. Block 0 is reserved for padding."""

    @property
    def kv(self) -> KVPlan: ...

    @property
    def depth(self) -> int:
        """Steps that may be unread when the next is launched: 0 on a CPU, 1 on CUDA."""


class Runner(RunnerFacts, Protocol):
    """Computes Batches in the order of submission."""

    def submit(self, batch: Batch) -> Pending:
        """Launch one step and return at once; with depth 0, once it is computed as far as possible without masks.

        Raise only when the device is lost, or InternalFailure if the previous step still waits for its masks. Any other
        failure of a launch is a fault of every row in the result.
        """

    def close(self) -> None: ...


class Event:
    """Something that sequences wait for and another thread of the engine's process does, such as compiling a grammar.

    An event is equal only to itself.
    """

    __slots__ = ()


class Inbox(Protocol):
    """The engine's end of the bridge, downward."""

    def drain(self, timeout_s: float | None) -> list[tuple[int, Down | Event]]:
        """Return the (front end, frame) pairs that came. Wait up to `timeout_s` for the first; None is without limit.

        An Event comes as a frame of front end -1. The list may be empty before `timeout_s` is over, so that the
        engine's loop can send its heartbeat.
        """

    def wake(self, event: Event) -> None:
        """Deliver `event` with the waiting `drain`, or with the next one. Thread-safe; never waits, never raises."""


class Outbox(Protocol):
    """The engine's end of the bridge, upward."""

    def send(self, frontend: int, frame: Up) -> None:
        """Queue one frame. Never blocks on a stalled front end and never raises."""

    def broadcast(self, load: Load) -> None:
        """Queue a Load for every front end. One that connects later gets the newest Load after the Facts."""


class Heartbeat(Protocol):
    """Tells the supervisor that a loop makes progress."""

    def beat(self, allowance_s: float, num_tokens: int = 0) -> None:
        """Promise the next beat within `allowance_s`, while `num_tokens` are computed. Never waits."""


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """The engine's end of the bridge, and the watcher of its loop."""

    inbox: Inbox
    outbox: Outbox
    heartbeat: Heartbeat
    #: Shortest time between two broadcasts of the Load.
    load_interval_s: float = 0.1


class FlightRecorder(Protocol):
    """A record of the requests in the steps in flight, which outlives the engine's process. Never waits."""

    def receiving(self, fingerprint: bytes) -> None:
        """Record that this request is being received, until `received` is called."""

    def received(self) -> None: ...

    def admitted(self, slot: int, since_step: int, fingerprint: bytes) -> None:
        """Record that this request has the slot.

        Args:
            since_step: the step of its admission minus the tokens of its output. A later step minus this bounds the
                tokens that the output has then. Negative if the output began in an earlier engine.
        """

    def launching(self, step: int, slots: tuple[int, ...]) -> None:
        """Record that a step that computes these slots is about to be launched."""

    def settled(self, step: int) -> None:
        """Record that this step and all before it were read and processed."""

    def remember(self, known: bytes) -> None:
        """Store data for the next engine, in place of what was stored before. Raise ValueError above 1 MiB."""


class EngineLink(Protocol):
    """A front end's end of the bridge. All calls and callbacks run on its event loop."""

    @property
    def facts(self) -> Facts | None:
        """The facts of the engine; None while none is ready."""

    def send(self, frame: Down) -> None:
        """Send one frame.

        Raise errors.EngineRestarting or errors.ModelLoading when there is no engine, and errors.QueueFull for an Add
        while the engine does not read. An Abort is always sent.
        """

    def listen(self, on_frame: Callable[[Up], None], on_lost: Callable[[], None]) -> None:
        """Call `on_frame` with every frame up, and `on_lost` when the engine is gone and all in flight has failed."""
