"""A stream's news as plain data; the server turns it into messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from photon_grpc.core.generation import Start, Timing, Usage
from photon_grpc.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class OutputFinish:
    reason: FinishReason
    #: Its cause; at most one is set.
    stop_string: str | None = None
    stop_token_id: int | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New ids of one output and the text that they release."""

    index: int
    text: str = ""
    #: Empty unless OutputOptions.token_ids asks for them.
    token_ids: tuple[int, ...] = ()
    finish: OutputFinish | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """One message's worth of a stream. `timing` is set on the last one only."""

    deltas: tuple[OutputDelta, ...]
    #: On the last one, or on every one with continuous_usage.
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The whole of a generation."""

    start: Start
    outputs: tuple[OutputDelta, ...]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
