"""Requests made of checked Asks: unset options get the model's values, then the neutral ones."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from photon_grpc.core.admission import check_kv, check_output, max_output_tokens
from photon_grpc.core.ask import Ask, ChatInput, IdsInput, OutputAsk, SamplingAsk, StopAsk, TextInput
from photon_grpc.core.fields import NEUTRAL
from photon_grpc.core.frames import Facts
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams
from photon_grpc.core.request import ANY_DRAFTS, FinishReason, Request, SamplingParams, StopParams
from photon_grpc.errors import InvalidRequest, PromptTooLong
from photon_grpc.frontend.logprob_bounds import fit_to_message
from photon_grpc.frontend.model import ServedModel

_parameters = attrgetter(*NEUTRAL)
_CONTINUE_FROM = "continue_from.ids"
_T = TypeVar("_T")


def to_request(
    ask: Ask, model: ServedModel, facts: Facts, prompt_ids: tuple[int, ...], *, request_id: str, random_seed: int
) -> Request:
    """Return the request of a checked `ask`. `random_seed` is used if the caller set none.

    Raise PromptTooLong (over the context), KVCapacity (over all KV blocks), InvalidRequest.
    """
    sampling, scores = _sampling(ask.sampling, model.defaults, random_seed), _scores(ask.output)
    num_outputs = _or(ask.sampling.num_outputs, 1)
    queue_deadline_s = _after(ask.origin.arrival_s, ask.scheduling.max_queue_duration_s)
    time_limit_s = _after(ask.origin.arrival_s, ask.stop.max_duration_s)
    request = Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_drafts=_or(ask.scheduling.speculation, ANY_DRAFTS),
        stop=_stop_of(ask, model, facts, len(prompt_ids)),
        arrival_s=ask.origin.arrival_s,
        owner=ask.origin.owner,
        num_outputs=num_outputs,
        priority=ask.scheduling.priority,
        deadline_s=ask.origin.deadline_s,
        queue_deadline_s=queue_deadline_s,
        time_limit_s=time_limit_s,
        # Owners do not share prefixes.
        salt=f"{ask.origin.owner}\0{ask.cache.salt}" if ask.origin.owner else ask.cache.salt,
        bypass_prefix_cache=ask.cache.bypass_prefix_cache,
        session_id=ask.cache.session_id,
        replaces=ask.replaces,
        is_seed_random=ask.sampling.seed is None,
        continued_ids=ask.continue_from,
        logprobs=scores,
    )
    if request.logprobs is NO_LOGPROBS:
        return request
    num_texts = 2 if model.has_parts(ask.input) else 1
    request = fit_to_message(request, model.max_message_bytes, model.tokenizer, num_texts=num_texts)
    if not ask.continue_from:
        return request
    # The prompt was scored by the call that began the output.
    return msgspec.structs.replace(request, logprobs=msgspec.structs.replace(request.logprobs, num_prompt_logprobs=-1))


def _sampling(ask: SamplingAsk, defaults: Mapping[str, Any], random_seed: int) -> SamplingParams:
    set_by_caller = {name: value for name, value in zip(NEUTRAL, _parameters(ask), strict=True) if value is not None}
    return SamplingParams(
        **{**defaults, **set_by_caller},
        seed=_or(ask.seed, random_seed),
        logit_bias=ask.logit_bias,
        allowed_token_ids=tuple(dict.fromkeys(ask.allowed_token_ids)) if ask.allowed_token_ids else (),
    )


def _scores(ask: OutputAsk) -> LogprobParams:
    if ask.logprobs is None and ask.prompt_logprobs is None and ask.score_token_ids is None:
        return NO_LOGPROBS
    return LogprobParams(_or(ask.logprobs, -1), _or(ask.prompt_logprobs, -1), ask.score_token_ids or ())


def _stop_of(ask: Ask, model: ServedModel, facts: Facts, num_prompt: int) -> StopParams:
    stop, num_continued = _stop(ask.stop, model, facts, num_prompt, _input_field(ask.input)), len(ask.continue_from)
    if num_continued > stop.max_tokens:
        error = PromptTooLong if ask.stop.max_tokens is None else InvalidRequest
        message = f"{_CONTINUE_FROM}: has {num_continued} tokens; the output ends after {stop.max_tokens}"
        raise error(message, field=_CONTINUE_FROM, needed=num_continued, limit=stop.max_tokens)
    return stop


def _stop(ask: StopAsk, model: ServedModel, facts: Facts, num_prompt: int, field: str) -> StopParams:
    min_tokens = _or(ask.min_tokens, 0)
    max_tokens = _max_tokens(ask.max_tokens, facts, num_prompt, field)
    if min_tokens > max_tokens:
        message = f"stop.min_tokens: {min_tokens} exceeds the {max_tokens} tokens that fit after the prompt"
        raise InvalidRequest(message, field="stop.min_tokens", needed=min_tokens, limit=max_tokens)
    eos_token_ids = () if ask.ignore_eos else model.eos_token_ids
    if min_tokens and len({*eos_token_ids, *ask.stop_token_ids}) >= facts.vocab_size:
        message = "with EOS they are the whole vocabulary, which leaves no token to sample below min_tokens"
        raise InvalidRequest(f"stop.stop_token_ids: {message}", field="stop.stop_token_ids")
    return StopParams(
        max_tokens=max_tokens,
        limit_reason=FinishReason.CONTEXT_LENGTH if ask.max_tokens is None else FinishReason.MAX_TOKENS,
        min_tokens=min_tokens,
        eos_token_ids=eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(ask.stop_token_ids)),
        has_stop_strings=bool(ask.stop_strings),
    )


def _max_tokens(max_tokens: int | None, facts: Facts, num_prompt: int, field: str) -> int:
    """Return `max_tokens`, by default all that fit after the prompt, at least one. `field` is the prompt's."""
    if max_tokens is None:
        check_kv(num_prompt, 1, facts, field)
        return max_output_tokens(num_prompt, facts)
    check_output(num_prompt, max_tokens, facts)
    return max_tokens


def _input_field(input: TextInput | IdsInput | ChatInput | None) -> str:
    if isinstance(input, IdsInput):
        return "token_ids.ids"
    return "text" if isinstance(input, TextInput) else "chat"


def _after(start_s: float, duration_s: float | None) -> float | None:
    return None if duration_s is None else start_s + duration_s


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
