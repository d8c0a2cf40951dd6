"""What a caller is told, as plain data: the floor above turns it into messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from photon_grpc.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    #: What ended it; at most one is set.
    stop_string: str | None = None
    stop_token_id: int | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new for one output: ids and the text that they release belong together."""

    index: int
    text: str = ""
    #: Empty unless OutputOptions.token_ids asks for them.
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    preemption_count: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Known when a request is admitted."""

    request_id: str
    model: str
    #: Wall-clock seconds since the epoch.
    create_time_s: float
    seed: int
    #: Empty unless OutputOptions.prompt_token_ids asks for them.
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """One message's worth of a stream. `timing` is set on the last one only."""

    deltas: tuple[Delta, ...]
    #: On the last one, or on every one with continuous_usage.
    usage: Usage | None = None
    timing: Timing | None = None

    @property
    def is_last(self) -> bool:
        return self.timing is not None


@dataclass(frozen=True, slots=True)
class Result:
    """The whole of a generation."""

    start: Start
    outputs: tuple[Delta, ...]
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
