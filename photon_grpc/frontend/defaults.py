"""An Ask made concrete: unset fields get the model's values, then the neutral ones; a wrong one is refused.

Every refusal names the field as the API spells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from photon_grpc.core.admission import (
    IdList,
    check_given,
    check_ids,
    check_kv,
    check_output,
    check_prompt,
    max_output_tokens,
)
from photon_grpc.core.ask import (
    NOTHING_SET,
    UNWRITTEN,
    Ask,
    ChatInput,
    ConstraintAsk,
    IdsInput,
    Origin,
    OutputAsk,
    SamplingAsk,
    StopAsk,
    TextInput,
)
from photon_grpc.core.field import Field
from photon_grpc.core.fields import FIELDS, NEUTRAL, fields_of
from photon_grpc.core.frames import Facts
from photon_grpc.core.logprobs import NO_LOGPROBS, LogprobParams
from photon_grpc.core.request import FinishReason, Request, SamplingParams, StopParams
from photon_grpc.errors import DeadlinePassed, FeatureNotSupported, InvalidRequest, PromptTooLong
from photon_grpc.frontend.constraints import constraint
from photon_grpc.frontend.input.chat import check_json
from photon_grpc.frontend.logprob_bounds import fitted
from photon_grpc.frontend.model import RequestLimits, ServedModel

_parameters = attrgetter(*NEUTRAL)
#: A group of options, what reads those that are checked, a group without any, and what surely passes.
_GroupChecks = tuple[str, Callable[[Any], Any], Any, list[tuple[Any, Any, Field]]]
_CONTINUE_FROM = "continue_from.ids"
_T = TypeVar("_T")


def check(ask: Ask, model: ServedModel, facts: Facts, limits: RequestLimits) -> None:
    """Check what does not depend on the prompt's ids. Raise InvalidRequest, FeatureNotSupported, PromptTooLong."""
    if not isinstance(ask.input, IdsInput):
        check_text_input(ask.input, model)
    _check_values(ask, limits)
    _check_stop(ask.stop, limits)
    _check_text_wanted(ask, model)
    if ask.continue_from and _or(ask.sampling.num_outputs, 1) > 1:
        raise _invalid("continue_from", f"one output can be continued; num_outputs is {ask.sampling.num_outputs}")
    if ask.sampling.logit_bias:
        FIELDS["logit_bias"].check_each(ask.sampling.logit_bias)
    if ask.sampling.allowed_token_ids == ():
        raise _invalid("sampling.allowed_token_ids", "must not be empty; unset allows all")
    if ask.constraint is not None:
        _check_constraint(ask.constraint, model, facts, limits)
    if isinstance(ask.input, ChatInput) and ask.input.tool_choice is not None:
        _check_tool_choice(ask.input, ask.constraint, model, facts)
    if ask.scheduling.priority and not model.obeys_priority:
        raise _lacking("PRIORITY", "scheduling.priority", "the scheduling policy of this server knows no priorities")
    _narrow_deadline(ask)
    check_deadline(ask.origin)
    check_given(ask.origin.request_id, _lists(ask, limits, facts), facts.vocab_size)


def _lists(ask: Ask, limits: RequestLimits, facts: Facts) -> Iterator[IdList]:
    """Yield every list of token ids in `ask` that is set."""
    if isinstance(ask.input, IdsInput):
        yield IdList("token_ids.ids", ask.input.token_ids, facts.max_model_len, is_prompt=True)
    if ask.sampling.logit_bias:
        biased = [token_id for token_id, _ in ask.sampling.logit_bias]
        yield IdList("sampling.logit_bias", biased, limits.max_logit_bias)
    if ask.sampling.allowed_token_ids is not None:
        yield IdList("sampling.allowed_token_ids.ids", ask.sampling.allowed_token_ids)
    if ask.stop.stop_token_ids:
        yield IdList("stop.stop_token_ids", ask.stop.stop_token_ids)
    if ask.continue_from:
        yield IdList(_CONTINUE_FROM, ask.continue_from)
    if ask.output.score_token_ids is not None:
        yield IdList("output.score_token_ids.ids", ask.output.score_token_ids, limits.max_logprobs)


def _narrow_deadline(ask: Ask) -> None:
    """Make the origin's deadline the earlier of the call's and the field's."""
    if ask.scheduling.timeout_s is not None:
        own_s, call_s = ask.origin.arrival_s + ask.scheduling.timeout_s, ask.origin.deadline_s
        ask.origin.deadline_s = own_s if call_s is None else min(own_s, call_s)


def check_deadline(origin: Origin) -> None:
    if origin.deadline_s is not None and origin.deadline_s <= time.monotonic():
        raise DeadlinePassed("the deadline has passed")


def check_text_input(input: TextInput | ChatInput | None, model: ServedModel) -> None:
    """Raise FeatureNotSupported without a tokenizer or template, InvalidRequest for an empty input or wrong JSON."""
    if input is None:
        raise InvalidRequest("there is no input: set text, token_ids or chat", field="input")
    if model.tokenizer is None:
        feature, field = ("TEXT", "text") if isinstance(input, TextInput) else ("CHAT", "chat")
        raise _lacking(feature, field, "this model has no tokenizer")
    elif isinstance(input, TextInput):
        if not input.text:
            raise _invalid("text", "must not be empty")
    elif model.template is None:
        raise _lacking("CHAT", "chat", "this model has no chat template")
    elif not input.messages:
        raise _invalid("chat.messages", "must not be empty")
    else:
        check_json(input)


def to_request(
    ask: Ask, model: ServedModel, facts: Facts, prompt_ids: tuple[int, ...], *, request_id: str, random_seed: int
) -> Request:
    """Return the concrete request for checked `ask`. `random_seed` is used where the caller set none.

    Raise PromptTooLong (over the context), KVCapacity (over all KV blocks), InvalidRequest, DeadlinePassed.
    """
    check_deadline(ask.origin)
    field = input_field(ask.input)
    if not isinstance(ask.input, IdsInput):  # ids were checked as they came
        _check_encoded(prompt_ids, facts, field)
    sampling, scores = _sampling(ask.sampling, model.defaults, random_seed), _scores(ask.output)
    num_outputs = _or(ask.sampling.num_outputs, 1)
    queue_deadline_s = _after(ask.origin.arrival_s, ask.scheduling.max_queue_duration_s)
    time_limit_s = _after(ask.origin.arrival_s, ask.stop.max_duration_s)
    request = Request(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stop=_stop_of(ask, model, facts, len(prompt_ids), field),
        arrival_s=ask.origin.arrival_s,
        owner=ask.origin.owner,
        num_outputs=num_outputs,
        priority=ask.scheduling.priority,
        deadline_s=ask.origin.deadline_s,
        queue_deadline_s=queue_deadline_s,
        time_limit_s=time_limit_s,
        # One owner's prefixes are not another's.
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
    request = fitted(request, model.max_message_bytes, model.tokenizer, num_texts=num_texts)
    if not ask.continue_from:
        return request
    # The prompt was scored by the call that began the output.
    return msgspec.structs.replace(request, logprobs=msgspec.structs.replace(request.logprobs, num_prompt_logprobs=-1))


def _check_encoded(prompt_ids: tuple[int, ...], facts: Facts, field: str) -> None:
    if not prompt_ids:
        raise _invalid(field, "gives no tokens")
    check_ids(prompt_ids, facts.vocab_size, field)
    check_prompt(len(prompt_ids), facts.max_model_len, field)


def input_field(input: TextInput | IdsInput | ChatInput | None) -> str:
    if isinstance(input, IdsInput):
        return "token_ids.ids"
    return "text" if isinstance(input, TextInput) else "chat"


def _check_values(ask: Ask, limits: RequestLimits) -> None:
    for group, get, unset, checks in _checks(limits):
        values = getattr(ask, group)
        if values is unset:
            continue
        for value, (least, most, field) in zip(get(values), checks, strict=True):
            if value is not None and not (least <= value <= most):
                field.check(value, limits)


@lru_cache(maxsize=4)
def _checks(limits: RequestLimits) -> list[_GroupChecks]:
    """Return the checks of each group under these limits."""
    checks: list[_GroupChecks] = []
    for group in ("cache", "sampling", "stop", "output", "stream", "scheduling"):
        fields = [field for field in fields_of(group) if field.is_checked]
        get = attrgetter(*(field.attribute for field in fields))
        checks.append(
            (group, get, getattr(NOTHING_SET, group), [(*field.sure_range(limits), field) for field in fields])
        )
    return checks


def _check_stop(ask: StopAsk, limits: RequestLimits) -> None:
    if ask.max_tokens is not None and ask.min_tokens is not None and ask.min_tokens > ask.max_tokens:
        raise _invalid(
            "stop.min_tokens",
            f"{ask.min_tokens} exceeds max_tokens {ask.max_tokens}",
            needed=ask.min_tokens,
            limit=ask.max_tokens,
        )
    if ask.stop_strings:
        _check_stop_strings(ask.stop_strings, limits)


def _check_constraint(ask: ConstraintAsk, model: ServedModel, facts: Facts, limits: RequestLimits) -> None:
    if not facts.has_grammars:
        why = "this model has no tokenizer" if model.tokenizer is None else "grammars do not know its tokenizer"
        raise _lacking(constraint.FEATURES[ask.kind], constraint.field_of(ask), why)
    if ask != UNWRITTEN:
        constraint.check_constraint(ask, limits.max_constraint_bytes)


def _check_tool_choice(chat: ChatInput, constraint_ask: ConstraintAsk | None, model: ServedModel, facts: Facts) -> None:
    """Check all but the tools themselves, which constraints/tools.py reads."""
    field = "chat.tool_choice"
    if model.answers.calls is None:
        raise _lacking("TOOL_CALLS", field, "this model's chat template writes tool calls in no way that is known here")
    if not facts.has_grammars:
        raise _lacking("JSON_SCHEMA", field, "grammars do not know this model's tokenizer")
    if constraint_ask is not None:
        raise _invalid(field, f"{constraint.field_of(constraint_ask)} is set, too; an output has one constraint")
    if "{" not in chat.tools_json:
        raise _invalid(field, "there are no tools to choose from: tools_json has none")


def _check_stop_strings(texts: tuple[str, ...], limits: RequestLimits) -> None:
    if len(texts) > limits.max_stop_strings:
        message = f"has {len(texts)} entries; {limits.max_stop_strings} are allowed"
        raise _invalid("stop.stop_strings", message, needed=len(texts), limit=limits.max_stop_strings)
    for i, text in enumerate(texts):
        field = f"stop.stop_strings[{i}]"
        if not text:
            raise _invalid(field, "must not be empty")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise _invalid(field, "holds a lone surrogate, which is not Unicode") from None
        if num_bytes > limits.max_stop_string_bytes:
            message = f"has {num_bytes} bytes; {limits.max_stop_string_bytes} are allowed"
            raise _invalid(field, message, needed=num_bytes, limit=limits.max_stop_string_bytes)


def _check_text_wanted(ask: Ask, model: ServedModel) -> None:
    if model.tokenizer is None and ask.output.text:
        raise _lacking("TEXT", "output.text", "this model has no tokenizer")
    if model.tokenizer is None and ask.stop.stop_strings:
        raise _lacking("TEXT", "stop.stop_strings", "this model has no tokenizer")


def _sampling(ask: SamplingAsk, defaults: Mapping[str, Any], random_seed: int) -> SamplingParams:
    given = {name: value for name, value in zip(NEUTRAL, _parameters(ask), strict=True) if value is not None}
    return SamplingParams(
        **{**defaults, **given},
        seed=_or(ask.seed, random_seed),
        logit_bias=ask.logit_bias,
        allowed_token_ids=tuple(dict.fromkeys(ask.allowed_token_ids)) if ask.allowed_token_ids else (),
    )


def _scores(ask: OutputAsk) -> LogprobParams:
    if ask.logprobs is None and ask.prompt_logprobs is None and ask.score_token_ids is None:
        return NO_LOGPROBS
    return LogprobParams(_or(ask.logprobs, -1), _or(ask.prompt_logprobs, -1), ask.score_token_ids or ())


def _stop(ask: StopAsk, model: ServedModel, facts: Facts, num_prompt: int, field: str) -> StopParams:
    min_tokens = _or(ask.min_tokens, 0)
    max_tokens = _max_tokens(ask.max_tokens, facts, num_prompt, field)
    if min_tokens > max_tokens:
        message = f"{min_tokens} exceeds the {max_tokens} tokens that fit after the prompt"
        raise _invalid("stop.min_tokens", message, needed=min_tokens, limit=max_tokens)
    eos_token_ids = () if ask.ignore_eos else model.eos_token_ids
    if min_tokens and len({*eos_token_ids, *ask.stop_token_ids}) >= facts.vocab_size:
        raise _invalid(
            "stop.stop_token_ids", "with EOS they are the whole vocabulary; below min_tokens none may be drawn"
        )
    return StopParams(
        max_tokens=max_tokens,
        limit_reason=FinishReason.CONTEXT_LENGTH if ask.max_tokens is None else FinishReason.MAX_TOKENS,
        min_tokens=min_tokens,
        eos_token_ids=eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(ask.stop_token_ids)),
        has_stop_strings=bool(ask.stop_strings),
    )


def _stop_of(ask: Ask, model: ServedModel, facts: Facts, num_prompt: int, field: str) -> StopParams:
    stop, num_continued = _stop(ask.stop, model, facts, num_prompt, field), len(ask.continue_from)
    if num_continued > stop.max_tokens:
        error = PromptTooLong if ask.stop.max_tokens is None else InvalidRequest
        message = f"{_CONTINUE_FROM}: has {num_continued} tokens; the output ends after {stop.max_tokens}"
        raise error(message, field=_CONTINUE_FROM, needed=num_continued, limit=stop.max_tokens)
    return stop


def _max_tokens(asked: int | None, facts: Facts, num_prompt: int, field: str) -> int:
    """Unset: all that fits after the prompt, one token at least. `field` is the prompt's."""
    if asked is None:
        check_kv(num_prompt, 1, facts, field)
        return max_output_tokens(num_prompt, facts)
    check_output(num_prompt, asked, facts)
    return asked


def _after(start_s: float, duration_s: float | None) -> float | None:
    return None if duration_s is None else start_s + duration_s


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _invalid(field: str, problem: str, *, needed: int | None = None, limit: int | None = None) -> InvalidRequest:
    return InvalidRequest(f"{field}: {problem}", field=field, needed=needed, limit=limit)


def _lacking(feature: str, field: str, why: str) -> FeatureNotSupported:
    return FeatureNotSupported(f"{field}: {why} (feature {feature})", field=field)
