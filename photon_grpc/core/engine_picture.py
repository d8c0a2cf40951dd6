"""The live picture of the engine: the work of its steps since the picture before, as numbers without ids or text."""

from __future__ import annotations

from enum import IntFlag

import msgspec

from photon_grpc.core.stats import Load

#: Most steps in one picture, and most lanes for each slot of the engine: all slots may change hands at the same step.
MAX_STEPS, MAX_LANES_PER_SLOT = 64, 2


class Mark(IntFlag):
    """An event in a lane since the picture before."""

    ADMITTED = 1
    PREEMPTED = 2
    ENDED = 4


class StepWork(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step."""

    duration_s: float
    prefill_tokens: int
    decode_tokens: int


class Lane(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence in one slot, from its admission until it ends or is preempted."""

    #: From 0 to max_num_seqs - 1.
    slot: int
    #: The same for a sequence that is resumed, another for every other sequence.
    sequence: int
    #: Ids that came with the request: the prompt, and an output that it continues.
    prompt_tokens: int
    #: Found in the prefix cache at the admission, or copied from another output.
    cached_tokens: int
    #: Tokens whose keys and values the slot holds; 0 after a preemption.
    computed_tokens: int
    output_tokens: int
    #: Tokens computed since the picture before.
    prefilled: int
    decoded: int
    #: Mark bits.
    marks: int


class EnginePicture(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The work of the engine since the picture before, sent to front ends that watch.

    Several lanes may have the same slot; the newest is the last. If there would be too many, some of those that have
    left their slot are missing, and the next lane of the slot contains what they computed.
    """

    #: Seconds since the engine started.
    time_s: float
    #: The newest steps, at most MAX_STEPS.
    steps: tuple[StepWork, ...]
    #: Steps since the picture before.
    num_steps: int
    #: Every slot that was in use since the picture before.
    lanes: tuple[Lane, ...]
    load: Load
