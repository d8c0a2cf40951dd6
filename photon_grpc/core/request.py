"""A request to the engine, with token ids and concrete parameters."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from photon_grpc.core.constraint import Constraint
from photon_grpc.core.fields import fields_of
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams


class FinishReason(IntEnum):
    """The reason why an output ended. The numbers are those of the proto, which a test checks."""

    UNSPECIFIED = 0
    EOS = 1
    STOP_STRING = 2
    STOP_TOKEN = 3
    MAX_TOKENS = 4
    CONTEXT_LENGTH = 5
    TIME_LIMIT = 6
    CONSTRAINT_COMPLETE = 7
    ABORTED = 8


_SAMPLING = [
    (field.name, field.stored_kind, field.empty if field.neutral is None else field.neutral)
    for field in fields_of("sampling")
    if field.name != "num_outputs"  # a field of Request
]
_FILTERS = [(field.name, field.neutral) for field in fields_of("sampling") if field.effect == "filter"]
_PENALTIES = [(field.name, field.neutral) for field in fields_of("sampling") if field.effect == "penalty"]
_Sampling: Any = msgspec.defstruct("_Sampling", _SAMPLING, frozen=True, array_like=True, gc=False)


class SamplingParams(_Sampling):  # type: ignore[misc]
    """Sampling parameters, as `core.fields` declares them. Every value is concrete; the defaults are neutral.

    Noise is keyed by (seed, output index, generated position, token id). `logit_bias` holds pairs of an id and the
    number added to its raw logit, each id once. Only `allowed_token_ids` may be sampled; () allows all.
    """

    @property
    def is_greedy(self) -> bool:
        """Return whether the temperature counts as 0."""
        return bool(self.temperature < 1e-5)

    @property
    def is_filtered(self) -> bool:
        return any(getattr(self, name) != neutral for name, neutral in _FILTERS)

    @property
    def is_penalised(self) -> bool:
        return any(getattr(self, name) != neutral for name, neutral in _PENALTIES)


class StopParams(msgspec.Struct, frozen=True, array_like=True):
    """The ends of an output: ids or a count. Stop strings belong to the front end."""

    #: Most tokens to generate, at least 1. Prompt + max_tokens fits the context and the KV cache.
    max_tokens: int
    #: The finish reason at max_tokens: MAX_TOKENS, or CONTEXT_LENGTH if the caller had set no limit.
    limit_reason: FinishReason = FinishReason.MAX_TOKENS
    #: None of the ids below can be sampled until this many are generated.
    min_tokens: int = 0
    #: Ids that end the output with EOS; empty to ignore EOS.
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: The front end may end the output once it has min_tokens.
    has_stop_strings: bool = False


class OwnerLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Limits on an owner's use of the service; None is no limit."""

    #: Requests in flight.
    max_concurrent: int | None = None
    #: Counts prompt and output tokens.
    tokens_per_minute: int | None = None
    #: While several owners have requests waiting, each gets tokens in proportion to its weight.
    weight: int = 1


NO_LIMITS = OwnerLimits()
#: As many drafts as the engine chooses.
ANY_DRAFTS = 1 << 16


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One unit of work, admitted or refused as a whole.

    Times are CLOCK_MONOTONIC seconds, which all processes of a machine share.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    arrival_s: float
    #: The name of the caller's API key. Request ids are unique per owner.
    owner: str = ""
    num_outputs: int = 1
    priority: int = 0
    #: The request fails after this.
    deadline_s: float | None = None
    #: The request fails if its first step has not begun by then.
    queue_deadline_s: float | None = None
    #: The output ends after this, with what it has.
    time_limit_s: float | None = None
    #: Prefixes are shared only between requests with equal salts.
    salt: str = ""
    bypass_prefix_cache: bool = False
    #: Prefixes of sessions are evicted later than others.
    session_id: str = ""
    #: 0 is the base model.
    adapter: int = 0
    #: A later attempt of the same call, which replaces an equal request in flight with the same id.
    replaces: bool = False
    #: The caller set no seed, so each attempt has another one.
    is_seed_random: bool = False
    #: Output ids that were produced elsewhere. They count as part of the output and are not sent. Only allowed with one
    #: output.
    continued_ids: tuple[int, ...] = ()
    logprobs: LogprobParams = NO_LOGPROBS
    #: The form of every output.
    constraint: Constraint | None = None
    #: The owner's limits when the request arrived.
    limits: OwnerLimits = NO_LIMITS
    #: Most tokens that a step drafts for an output.
    max_drafts: int = ANY_DRAFTS

    @property
    def least_tokens(self) -> int:
        """A lower bound on the tokens of an output, `continued_ids` included."""
        stop = self.stop
        if self.constraint is None:
            return stop.min_tokens if self._may_stop else stop.max_tokens
        # A complete constraint ends an output even below min_tokens.
        least = self.constraint.least_tokens
        return min(least, stop.max_tokens, stop.min_tokens if stop.has_stop_strings else least)

    @property
    def _may_stop(self) -> bool:
        """Return whether anything but max_tokens may end an output without constraint."""
        stop = self.stop
        ends = {*stop.eos_token_ids, *stop.stop_token_ids}
        allowed = self.sampling.allowed_token_ids
        has_ended = bool(self.continued_ids) and self.continued_ids[-1] in ends
        return stop.has_stop_strings or has_ended or bool(ends.intersection(allowed) if allowed else ends)

    @property
    def num_given(self) -> int:
        """Tokens to compute before the first one is sampled."""
        return len(self.prompt_ids) + len(self.continued_ids)

    def is_attempt_of(self, other: Request) -> bool:
        """Return whether both may be attempts of one call: all that the caller decides is equal.

        Times, limits and a random seed differ between attempts. Values are compared rather than digests, since only
        requests with the same id are compared.
        """
        return self._without_attempt() == other._without_attempt()

    def _without_attempt(self) -> Request:
        """Return the request with neutral values for what belongs to a single attempt."""
        return msgspec.structs.replace(
            self,
            sampling=msgspec.structs.replace(self.sampling, seed=0) if self.is_seed_random else self.sampling,
            arrival_s=0.0,
            deadline_s=None,
            queue_deadline_s=None,
            time_limit_s=None,
            replaces=False,
            limits=NO_LIMITS,
        )
