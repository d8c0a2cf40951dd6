"""A request to the engine: ids, concrete parameters, nothing left to guess."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from photon_grpc.core.constraint import Constraint
from photon_grpc.core.fields import fields_of
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams


class FinishReason(IntEnum):
    """The end of an output. The numbers are those of the wire (a test holds them equal)."""

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
    if field.name != "num_outputs"  # the Request's
]
_FILTERS = [(field.name, field.neutral) for field in fields_of("sampling") if field.effect == "filter"]
_PENALTIES = [(field.name, field.neutral) for field in fields_of("sampling") if field.effect == "penalty"]
_Sampling: Any = msgspec.defstruct("_Sampling", _SAMPLING, frozen=True, array_like=True, gc=False)


class SamplingParams(_Sampling):  # type: ignore[misc]
    """Parameters of a draw, as `core.fields` declares them. Every value is concrete; the defaults are neutral.

    Noise is keyed by (seed, output index, generated position, token id). `logit_bias` holds (id, added to its raw
    logit), each id once; `allowed_token_ids` only may be drawn, () is all.
    """

    @property
    def is_greedy(self) -> bool:
        """Of such a row the runner knows temperature 0."""
        return bool(self.temperature < 1e-5)

    @property
    def is_filtered(self) -> bool:
        return any(getattr(self, name) != neutral for name, neutral in _FILTERS)

    @property
    def is_penalised(self) -> bool:
        return any(getattr(self, name) != neutral for name, neutral in _PENALTIES)


class StopParams(msgspec.Struct, frozen=True, array_like=True):
    """Ends of an output by ids or count; stop strings belong to the front end."""

    #: Tokens to generate at most, at least 1. Prompt + max_tokens fits the context and the KV cache.
    max_tokens: int
    #: The reason to give when max_tokens is reached: MAX_TOKENS, or CONTEXT_LENGTH where the caller had set none.
    limit_reason: FinishReason = FinishReason.MAX_TOKENS
    #: Until so many are generated, no id below can be drawn.
    min_tokens: int = 0
    #: Ids that end the output as EOS; empty when EOS is to be ignored.
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: The front end may end the output, once it has min_tokens.
    has_stop_strings: bool = False


class OwnerLimits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of the service that an owner may have; None is no limit."""

    #: Requests in flight.
    max_concurrent: int | None = None
    #: Prompt and output tokens.
    tokens_per_minute: int | None = None
    #: Beside other owners with requests waiting: tokens in proportion to it.
    weight: int = 1


NO_LIMITS = OwnerLimits()


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One admitted-or-refused unit of work. Times are CLOCK_MONOTONIC seconds, the same in all processes of a
    machine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    arrival_s: float
    #: The caller's credential: request ids are unique per owner.
    owner: str = ""
    num_outputs: int = 1
    priority: int = 0
    #: Hard limit: after it the request fails.
    deadline_s: float | None = None
    #: Longest wait for the first step.
    queue_deadline_s: float | None = None
    #: Soft limit: after it the output ends with what it has.
    time_limit_s: float | None = None
    #: Prefixes are shared only among equal salts.
    salt: str = ""
    bypass_prefix_cache: bool = False
    #: Prefixes of sessions are evicted after all others.
    session_id: str = ""
    #: 0 is the base model.
    adapter: int = 0
    #: Another attempt of the same call: takes the place of an equal request in flight with the same id.
    replaces: bool = False
    #: The caller set no seed; each attempt draws its own.
    is_seed_random: bool = False
    #: Output ids that were produced elsewhere: they count as the output's own and are not sent. Of one output only.
    continued_ids: tuple[int, ...] = ()
    logprobs: LogprobParams = NO_LOGPROBS
    #: What every output must look like.
    constraint: Constraint | None = None
    #: Of the owner, as they are when it comes.
    limits: OwnerLimits = NO_LIMITS

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest output, those that it continues from among them: as many as are sure."""
        stop = self.stop
        if self.constraint is None:
            return stop.min_tokens if self._may_stop else stop.max_tokens
        # A constraint that is complete ends an output below min_tokens, too.
        least = self.constraint.least_tokens
        return min(least, stop.max_tokens, stop.min_tokens if stop.has_stop_strings else least)

    @property
    def _may_stop(self) -> bool:
        """Return whether anything but max_tokens may end an output without constraint."""
        stop = self.stop
        ends = {*stop.eos_token_ids, *stop.stop_token_ids}
        allowed = self.sampling.allowed_token_ids
        is_given = bool(self.continued_ids) and self.continued_ids[-1] in ends
        return stop.has_stop_strings or is_given or bool(ends.intersection(allowed) if allowed else ends)

    @property
    def num_given(self) -> int:
        """Tokens to compute before the first is drawn."""
        return len(self.prompt_ids) + len(self.continued_ids)

    def is_attempt_of(self, other: Request) -> bool:
        """Return whether both may come from one call: equal in all that the caller says to the engine.

        Times and limits belong to an attempt, and so does a drawn seed. Values are compared, not digests: only attempts
        under one id meet here.
        """
        return self._said() == other._said()

    def _said(self) -> Request:
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
