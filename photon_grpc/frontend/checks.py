"""Checks of an Ask. Every error names the field as the API spells it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Any

from photon_grpc.core.admission import IdList, check_given, check_ids, check_prompt
from photon_grpc.core.ask import (
    NOTHING_SET,
    UNWRITTEN,
    Ask,
    ChatInput,
    ConstraintAsk,
    IdsInput,
    Origin,
    StopAsk,
    TextInput,
)
from photon_grpc.core.field import Field
from photon_grpc.core.fields import FIELDS, fields_of
from photon_grpc.core.frames import Facts
from photon_grpc.errors import DeadlinePassed, FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.constraints import constraint
from photon_grpc.frontend.input.chat_json import check_json
from photon_grpc.frontend.input.chat_variables import check_tools
from photon_grpc.frontend.model import RequestLimits, ServedModel

_LATE = "the deadline has passed"

#: A group of options, the getter of its checked options, the group with nothing set, and for each option the range that
#: needs no closer look.
_GroupChecks = tuple[str, Callable[[Any], Any], Any, list[tuple[Any, Any, Field]]]


def check(ask: Ask, model: ServedModel, facts: Facts, limits: RequestLimits) -> None:
    """Check all that can be checked before the prompt is encoded, and narrow the deadline of its origin.

    Raise InvalidRequest, FeatureNotSupported, PromptTooLong, DeadlinePassed.
    """
    if not isinstance(ask.input, IdsInput):
        check_text_input(ask.input, model)
    _check_values(ask, limits)
    _check_stop(ask.stop, limits)
    _check_text_support(ask, model)
    num_outputs = ask.sampling.num_outputs
    if ask.continue_from and num_outputs is not None and num_outputs > 1:
        raise _invalid("continue_from", f"only one output can be continued; num_outputs is {num_outputs}")
    if ask.sampling.logit_bias:
        FIELDS["logit_bias"].check_each(ask.sampling.logit_bias)
    if ask.sampling.allowed_token_ids == ():
        raise _invalid("sampling.allowed_token_ids", "must not be empty; leave it unset to allow all")
    if ask.constraint is not None:
        _check_constraint(ask.constraint, model, facts, limits)
    if isinstance(ask.input, ChatInput) and ask.input.tool_choice is not None:
        _check_tool_choice(ask.input, ask.constraint, model, facts)
    if ask.scheduling.priority and not model.obeys_priority:
        raise _lacking("PRIORITY", "scheduling.priority", "the scheduling policy of this server ignores priorities")
    _narrow_deadline(ask)
    is_late = _is_late(ask.origin)
    check_given(ask.origin.request_id, _id_lists(ask, limits, facts), facts.vocab_size)
    if is_late:  # after all other checks: clients retry it, and an invalid request would fail again
        raise DeadlinePassed(_LATE)


def _id_lists(ask: Ask, limits: RequestLimits, facts: Facts) -> list[IdList]:
    """Return every list of token ids in `ask` that is set."""
    lists: list[IdList] = []
    if isinstance(ask.input, IdsInput):
        lists.append(IdList("token_ids.ids", ask.input.token_ids, facts.max_model_len, is_prompt=True))
    if ask.sampling.logit_bias:
        biased = [token_id for token_id, _ in ask.sampling.logit_bias]
        lists.append(IdList("sampling.logit_bias", biased, limits.max_logit_bias, at="[{id}]"))
    if ask.sampling.allowed_token_ids is not None:
        lists.append(IdList("sampling.allowed_token_ids.ids", ask.sampling.allowed_token_ids))
    if ask.stop.stop_token_ids:
        lists.append(IdList("stop.stop_token_ids", ask.stop.stop_token_ids))
    if ask.continue_from:
        lists.append(IdList("continue_from.ids", ask.continue_from))
    if ask.output.score_token_ids is not None:
        lists.append(IdList("output.score_token_ids.ids", ask.output.score_token_ids, limits.max_logprobs))
    return lists


def check_encoded(ask: Ask, prompt_ids: tuple[int, ...], facts: Facts) -> None:
    """Check an encoded prompt's ids, then the deadline again. Raise InvalidRequest, PromptTooLong, DeadlinePassed."""
    if not isinstance(ask.input, IdsInput):  # those were checked by `check`
        field = "text" if isinstance(ask.input, TextInput) else "chat"
        if not prompt_ids:
            raise _invalid(field, "gives no tokens")
        check_ids(prompt_ids, facts.vocab_size, field, at="")
        check_prompt(len(prompt_ids), facts.max_model_len, field)
    if _is_late(ask.origin):
        raise DeadlinePassed(_LATE)


def _narrow_deadline(ask: Ask) -> None:
    """Make the origin's deadline the earlier of the call's and the field's."""
    if ask.scheduling.timeout_s is not None:
        field_s, call_s = ask.origin.arrival_s + ask.scheduling.timeout_s, ask.origin.deadline_s
        ask.origin.deadline_s = field_s if call_s is None else min(field_s, call_s)


def _is_late(origin: Origin) -> bool:
    return origin.deadline_s is not None and origin.deadline_s <= time.monotonic()


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
        if input.tools:
            check_tools(input)
        check_json(input)


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
        why = "this model has no tokenizer" if model.tokenizer is None else "grammars do not support its tokenizer"
        raise _lacking(constraint.FEATURES[ask.kind], constraint.field_of(ask), why)
    if ask != UNWRITTEN:
        constraint.check_constraint(ask, limits.max_constraint_bytes)


def _check_tool_choice(chat: ChatInput, constraint_ask: ConstraintAsk | None, model: ServedModel, facts: Facts) -> None:
    """Check all but the tools themselves, which constraints/tools.py checks."""
    field = "chat.tool_choice"
    if model.answers.calls is None:
        raise _lacking("TOOL_CALLS", field, "this server cannot read the tool calls of this model's chat template")
    if not facts.has_grammars:
        raise _lacking("JSON_SCHEMA", field, "grammars do not support this model's tokenizer")
    if constraint_ask is not None:
        raise _invalid(field, f"{constraint.field_of(constraint_ask)} is set, too; an output has one constraint")
    if not chat.has_tools:
        raise _invalid(field, "there are no tools to choose from; set tools")


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


def _check_text_support(ask: Ask, model: ServedModel) -> None:
    if model.tokenizer is None and ask.output.text:
        raise _lacking("TEXT", "output.text", "this model has no tokenizer")
    if model.tokenizer is None and ask.stop.stop_strings:
        raise _lacking("TEXT", "stop.stop_strings", "this model has no tokenizer")


def _invalid(field: str, problem: str, *, needed: int | None = None, limit: int | None = None) -> InvalidRequest:
    return InvalidRequest(f"{field}: {problem}", field=field, needed=needed, limit=limit)


def _lacking(feature: str, field: str, why: str) -> FeatureNotSupported:
    return FeatureNotSupported(f"{field}: {why} (feature {feature})", field=field)
