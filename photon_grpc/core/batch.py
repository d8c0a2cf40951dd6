"""The input and the output of a step, as plain numbers that can be sent to every rank and process."""

from __future__ import annotations

import msgspec

from photon_grpc.core.expert_tally import ExpertTally
from photon_grpc.core.fault import Fault
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams
from photon_grpc.core.request import SamplingParams
from photon_grpc.errors import InvalidConstraint, NumericFailure

#: What a runner returns instead of an id when the logits hold NaN or +infinity, and when every logit is -infinity after
#: bans and masks.
NAN_LOGITS, NOTHING_TO_SAMPLE = -1, -2

#: `Batch.drafts` that runners have shapes for; any other number is computed as well.
DRAFT_COUNTS = (1, 3, 5, 7)
#: The most tokens of a step with drafts that runners have a shape for, and the most rows of one.
MAX_VERIFY_TOKENS, MAX_DRAFTING_ROWS = 256, 128


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """Everything the runner must know about a sequence, sent once, when it gets a slot."""

    slot: int
    #: The prompt, followed by what was already generated if the sequence resumes.
    ids: tuple[int, ...]
    num_prompt: int
    #: Tokens whose keys and values are already in `blocks` (a prefix hit, a fork).
    num_computed: int
    #: Per KVGroup, the block ids held so far.
    blocks: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    #: Index among the request's outputs; part of the key of the sampling noise.
    output_index: int = 0
    #: Ids that cannot be sampled until `min_tokens` are generated.
    min_tokens: int = 0
    banned_until_min: tuple[int, ...] = ()
    #: Its `num_prompt_logprobs` only applies to rows in `Batch.prompt_logprob_rows`.
    logprobs: LogprobParams = NO_LOGPROBS
    #: Whether drafters compute its prompt; without, few of its drafts are right.
    is_drafted: bool = True


class Growth(msgspec.Struct, frozen=True, array_like=True):
    """Blocks added to a sequence's table: `groups[group][offset:]` is now `blocks`."""

    slot: int
    group: int
    offset: int
    blocks: tuple[int, ...]


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One step: columns over its rows, then the changes since the previous step.

    The runner applies `left`, `admissions`, `grown` and `copies`, in this order. It then computes `counts[i]` further
    tokens of `slots[i]`: first the known ones, then `yields[i] - 1` drafts that it is given or makes. It samples an id
    after the last known token and after every draft. It keeps the first, and each next one as long as the draft before
    it equals the id kept there. The kept ids are therefore those of a runner without drafts.
    """

    step: int
    slots: tuple[int, ...]
    counts: tuple[int, ...]
    #: Most ids that the row may yield: 0 inside a prefill, 1 + its drafts in a decode row that verifies drafts,
    #: else 1.
    yields: tuple[int, ...]
    #: Slots whose sequence has left.
    left: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    grown: tuple[Growth, ...] = ()
    #: (source, destination) blocks to duplicate before anything is computed.
    copies: tuple[tuple[int, int], ...] = ()
    #: Most drafts of a decode row (k). A row near its end has fewer. `counts` includes them.
    drafts: int = 0
    #: Rows (not slots) that yield and wait for a mask before sampling, ascending.
    masked: tuple[int, ...] = ()
    #: (row, first) of the rows that need log-probabilities of prompt tokens, ascending. A row that computes positions
    #: [a, a + n) scores the prompt ids at first ... min(a + n, num_prompt - 1), first > a. The logits at position p
    #: score the id at p + 1.
    prompt_logprob_rows: tuple[tuple[int, int], ...] = ()
    #: (slot, its first drafts) where the engine knows them; the runner makes those behind.
    given: tuple[tuple[int, tuple[int, ...]], ...] = ()


#: NAN_LOGITS and NOTHING_TO_SAMPLE as faults. In place of a row's first id, a code fails the row; after kept ids it
#: only ends them.
FAULTS = {
    NAN_LOGITS: Fault.of(NumericFailure("the model gave NaN or infinite logits for this request")),
    NOTHING_TO_SAMPLE: Fault.of(
        InvalidConstraint("no id is left to sample: the request bans all that its constraint allows")
    ),
}


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The sampled ids and the faults of one step."""

    step: int
    #: Kept ids, flattened over the yielding rows in Batch order.
    ids: tuple[int, ...]
    #: Row -> what went wrong. The ids of such a row are meaningless.
    faults: dict[int, Fault] = {}
    #: Seconds from submit to result.
    duration_s: float = 0.0
    #: Number of ids of each yielding row, in Batch order, at most its `yields`. () means one each.
    lengths: tuple[int, ...] = ()
    #: Row -> the RECORDs of its kept ids, `LogprobParams.num_records` each, for rows without a fault that want them.
    logprobs: dict[int, bytes] = {}
    #: Row -> the RECORDs of its prompt positions, for rows of `Batch.prompt_logprob_rows` without a fault.
    prompt_logprobs: dict[int, bytes] = {}
    #: Numbers of keys and values, since the start, that were beyond the range of the KV cache's 8 bits, as far as
    #: known; 0 where this step has no count.
    num_saturated: int = 0
    #: None: the model has no experts, or this step has no count.
    experts: ExpertTally | None = None
