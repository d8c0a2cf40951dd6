"""What one step computes, and what it produced: ints only, so that every rank and every process can be told the same."""

from __future__ import annotations

import msgspec

from photon_grpc.core.request import SamplingParams


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot: everything the runner must know about it, sent once."""

    slot: int
    #: Prompt, and what was already generated where it resumes.
    ids: tuple[int, ...]
    num_prompt: int
    #: Tokens whose keys and values are already in `blocks` (a prefix hit, a fork).
    num_computed: int
    #: Per KVGroup, the block ids held so far.
    blocks: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    #: Which of the request's outputs: part of the noise's key.
    output_index: int = 0
    #: Ids that cannot be drawn while fewer than `min_tokens` are generated.
    min_tokens: int = 0
    banned_until_min: tuple[int, ...] = ()


class Growth(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's table got blocks: `groups[group][offset:]` is now `blocks`."""

    slot: int
    group: int
    offset: int
    blocks: tuple[int, ...]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One step: columns over its rows, then what changed since the step before.

    The runner applies, in this order: left, admissions, grown, copies; then it computes `counts[i]` further tokens of `slots[i]`.
    """

    step: int
    slots: tuple[int, ...]
    counts: tuple[int, ...]
    #: 1 where the row's last token is followed by a drawn one, 0 in the middle of a prefill.
    yields: tuple[int, ...]
    #: Slots whose sequence is gone.
    left: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    grown: tuple[Growth, ...] = ()
    #: (source, destination) blocks to duplicate before anything is computed.
    copies: tuple[tuple[int, int], ...] = ()
    #: Tokens drafted for every decode row; its count includes them.
    drafts: int = 0
    #: Rows (not slots) whose draw waits for a mask, ascending.
    masked: tuple[int, ...] = ()
    #: (row, first position) of rows whose prompt is scored from that position on.
    scored: tuple[tuple[int, int], ...] = ()


class Fault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What went wrong with one row."""

    reason: str
    message: str


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step produced."""

    step: int
    #: Drawn ids, flattened over the yielding rows in Batch order.
    ids: tuple[int, ...]
    #: Row -> what went wrong; such a row's id means nothing.
    faults: dict[int, Fault] = {}
    #: Seconds from submit to result.
    duration_s: float = 0.0
    #: Ids of each yielding row, in Batch order; () is one each.
    lengths: tuple[int, ...] = ()
    #: Scores of drawn ids and of prompts, packed; the front end unpacks them.
    scores: bytes = b""
