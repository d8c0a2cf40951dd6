"""A step in and out: ints only, so that every rank and every process can be told the same."""

from __future__ import annotations

import msgspec

from photon_grpc.core.fault import Fault
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import InvalidConstraint, NumericFailure

#: A runner's answer in place of an id: the logits hold NaN or +infinity; every logit is -infinity, after bans and
#: masks.
NAN_LOGITS, NOTHING_TO_SAMPLE = -1, -2


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
    #: Index among the request's outputs: part of the noise's key.
    output_index: int = 0
    #: Ids that cannot be drawn while fewer than `min_tokens` are generated.
    min_tokens: int = 0
    banned_until_min: tuple[int, ...] = ()
    #: Its `prompt_logprobs` only says how to score a row of `Batch.prompt_logprob_rows`.
    logprobs: LogprobParams = NO_LOGPROBS


class Growth(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's table got blocks: `groups[group][offset:]` is now `blocks`."""

    slot: int
    group: int
    offset: int
    blocks: tuple[int, ...]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One step: columns over its rows, then what changed since the step before.

    The runner applies, in this order: left, admissions, grown, copies; then it computes `counts[i]` further tokens of
    `slots[i]`: those that the slot knows, then `yields[i] - 1` drafts of its own. Of the ids drawn behind the last
    known token and behind every draft it keeps the first, and each next one while the draft before it equals the id
    kept there; so the kept ids are those of a runner without drafts.
    """

    step: int
    slots: tuple[int, ...]
    counts: tuple[int, ...]
    #: Ids that the row may yield: 0 in the middle of a prefill; 1; 1 + its drafts in a decode row that verifies some.
    yields: tuple[int, ...]
    #: Slots whose sequence is gone.
    left: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    grown: tuple[Growth, ...] = ()
    #: (source, destination) blocks to duplicate before anything is computed.
    copies: tuple[tuple[int, int], ...] = ()
    #: Drafts of one decode row at most, k; a row near its end has fewer. Every count includes the row's own.
    drafts: int = 0
    #: Rows (not slots) that yield and whose draw waits for a mask, ascending.
    masked: tuple[int, ...] = ()
    #: (row, first) of rows that score prompt tokens, ascending: of a row that computes the positions [a, a + n) those
    #: at first ... min(a + n, num_prompt - 1), where first > a. The logits of position p score the id at p + 1.
    prompt_logprob_rows: tuple[tuple[int, int], ...] = ()


#: What NAN_LOGITS and NOTHING_TO_SAMPLE are as faults. One in place of a row's first id is the row's fault; behind kept
#: ids it only ends them.
FAULTS = {
    NAN_LOGITS: Fault.of(NumericFailure("the model gave NaN or infinite logits for this request")),
    NOTHING_TO_SAMPLE: Fault.of(
        InvalidConstraint("the ids that the request bans and those that its constraint allows leave none to draw")
    ),
}


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The ids and faults of one step."""

    step: int
    #: Kept ids, flattened over the yielding rows in Batch order.
    ids: tuple[int, ...]
    #: Row -> what went wrong; such a row's ids mean nothing.
    faults: dict[int, Fault] = {}
    #: Seconds from submit to result.
    duration_s: float = 0.0
    #: Ids of each yielding row, in Batch order, at most its `yields`; () is one each.
    lengths: tuple[int, ...] = ()
    #: Row -> the RECORDs of its kept ids, `LogprobParams.num_records` each, of rows without a fault that ask for them.
    logprobs: dict[int, bytes] = {}
    #: Row -> the RECORDs of the prompt positions it scored, of rows of `Batch.prompt_logprob_rows` without a fault.
    prompt_logprobs: dict[int, bytes] = {}
