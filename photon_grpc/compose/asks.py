"""Arguments of `LLM` made into Asks: the one place that checks Python values, by the declared types of `make_ask`."""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from photon_grpc.compose.message_type import constraint_of
from photon_grpc.core.generation import Prompt
from photon_grpc.core.object_type import object_type_of
from photon_grpc.core.option_names import unknown_option
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.ask import (
    Ask,
    CacheAsk,
    ChatInput,
    ChatMessage,
    ConstraintAsk,
    IdsInput,
    Kind,
    Origin,
    OutputAsk,
    SamplingAsk,
    SchedulingAsk,
    StopAsk,
    TextInput,
    ToolChoice,
)

#: A prompt in a list, a turn in it, its texts.
_DEPTH = 3


class _Turn(ChatMessage, frozen=True, forbid_unknown_fields=True):
    """Of a conversation: a ChatMessage that refuses what it has no field for."""


def make_ask(
    prompt: Prompt,
    *,
    chat: bool = False,
    template_args_json: str = "",
    tools_json: str = "",
    tool_choice: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    seed: int | None = None,
    logit_bias: dict[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    num_outputs: int | None = None,
    stop_strings: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    include_stop_in_text: bool = False,
    skip_special_tokens: bool = True,
    max_duration: float | None = None,
    priority: int = 0,
    continue_from: Sequence[int] = (),
    session_id: str = "",
    salt: str = "",
    bypass_prefix_cache: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    score_token_ids: Sequence[int] | None = None,
    json_schema: str | dict[str, Any] | None = None,
    json_object: bool = False,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
    message_type: type | None = None,
) -> Ask:
    """The options have the names and meanings of the protos; None is the model's default, then the neutral value. As
    `json_schema`, callers may give a class (see core/object_type.py)."""
    stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    return Ask(
        input=_input(prompt, chat, template_args_json, tools_json, tool_choice),
        origin=Origin(time.monotonic()),
        sampling=SamplingAsk(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            logit_bias=tuple(sorted((logit_bias or {}).items())),
            allowed_token_ids=None if allowed_token_ids is None else tuple(allowed_token_ids),
            num_outputs=num_outputs,
        ),
        stop=StopAsk(
            max_tokens, min_tokens, stops, tuple(stop_token_ids), ignore_eos, include_stop_in_text, max_duration
        ),
        output=OutputAsk(
            token_ids=True,
            skip_special_tokens=skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            score_token_ids=None if score_token_ids is None else tuple(score_token_ids),
        ),
        cache=CacheAsk(session_id, salt, bypass_prefix_cache),
        scheduling=SchedulingAsk(priority=priority),
        continue_from=tuple(continue_from),
        constraint=_constraint(json_schema, json_object, regex, choices, grammar, message_type),
    )


def ask_for(prompt: Any, options: Mapping[str, Any]) -> Ask:
    """`make_ask` for values of any type. Raise InvalidRequest naming the first that is of a wrong one, TypeError for
    an option that there is none of."""
    (ask,) = _asks([("prompt", prompt)], options)
    return ask


def asks_for(prompts: Any, options: Mapping[str, Any]) -> list[Ask]:
    """One for every prompt: `prompts` is one text, or a sequence of prompts. Raise as `ask_for`."""
    if isinstance(prompts, str):
        return _asks([("prompts", prompts)], options)
    listed = typed("prompts", prompts, str | list[Any])
    if listed and isinstance(listed[0], int) and not isinstance(listed[0], bool):
        raise InvalidRequest("one prompt of ids is a list within the list: [[1, 2, 3]]", field="prompts")
    if listed and isinstance(listed[0], Mapping):
        raise InvalidRequest("one conversation is a list within the list: [[{...}, {...}]]", field="prompts")
    return _asks([(f"prompts[{index}]", prompt) for index, prompt in enumerate(listed)], options)


def typed(name: str, value: Any, kind: Any) -> Any:
    """`value` as the declared type `kind`; what has a `tolist` (numpy, torch) counts as the Python value that it gives.

    Raise InvalidRequest naming `name`: nothing is rounded, parsed or taken for true.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, AttributeError):  # the latter where an array is taken for a mapping
        pass
    try:
        return msgspec.convert(_plain(value), kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).replace("`", "").replace(" | null", "").partition(" - at $")
        message = f"{name}{path}: {what[0].lower()}{what[1:]}"
        raise InvalidRequest(message, field=f"{name}{path}") from None


def _asks(prompts: Sequence[tuple[str, Any]], options: Mapping[str, Any]) -> list[Ask]:
    known = _kinds()
    for name in options.keys() - known.keys():
        raise TypeError(f"{unknown_option(name, known)}; there are {', '.join(sorted(known.keys() - {'chat'}))}")
    if (object_type := object_type_of(options)) is not None:
        options = {**options, "json_schema": object_type.schema}
    given = {name: typed(name, value, known[name]) for name, value in options.items() if value is not None}
    kind: Any = str | list[_Turn] if given.get("chat") else str | list[int]
    return [make_ask(typed(name, prompt, kind), **given) for name, prompt in prompts]


@cache
def _kinds() -> dict[str, Any]:
    """The options and their declared types."""
    hints = typing.get_type_hints(make_ask)
    return {name: kind for name, kind in hints.items() if name not in ("prompt", "return")}


def _plain(value: Any, depth: int = _DEPTH) -> Any:
    if not depth or isinstance(value, str | bytes | bytearray | memoryview | type):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each, depth - 1) for key, each in value.items()}
    return [_plain(each, depth - 1) for each in value] if isinstance(value, Sequence) else value


def _constraint(
    json_schema: str | dict[str, Any] | None,
    json_object: bool,
    regex: str | None,
    choices: Sequence[str] | None,
    grammar: str | None,
    message_type: type | None,
) -> ConstraintAsk | None:
    schema = _json(json_schema) if isinstance(json_schema, dict) else json_schema
    texts: tuple[tuple[Kind, str | None], ...] = (("json_schema", schema), ("regex", regex), ("grammar", grammar))
    given = [ConstraintAsk(kind, text) for kind, text in texts if text is not None]
    if json_object:
        given.append(ConstraintAsk("json_object"))
    if choices is not None:
        given.append(ConstraintAsk("choices", choices=tuple(choices)))
    if message_type is not None:
        given.append(constraint_of(message_type))
    if len(given) > 1:
        kinds = " and ".join(each.kind for each in given)
        raise InvalidRequest(f"{kinds} are set; an output has one constraint", field="structured_output")
    return given[0] if given else None


def _json(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema: is not JSON: {error}", field="json_schema") from None


def _input(
    prompt: Any, chat: bool, template_args_json: str, tools_json: str, tool_choice: str | None
) -> TextInput | IdsInput | ChatInput:
    if not chat:
        given = {"template_args_json": template_args_json or None, "tools_json": tools_json or None}
        for name, value in (*given.items(), ("tool_choice", tool_choice)):
            if value is not None:
                raise InvalidRequest(f"{name} is for a chat: set chat=True", field=name)
        return TextInput(prompt) if isinstance(prompt, str) else IdsInput(tuple(prompt))
    turns = [_Turn("user", prompt)] if isinstance(prompt, str) else prompt
    messages = tuple(ChatMessage(**msgspec.structs.asdict(turn)) for turn in turns)
    return ChatInput(messages, template_args_json, tools_json, tool_choice=_choice(tool_choice))


def _choice(tool_choice: str | None) -> ToolChoice | None:
    if tool_choice in (None, "auto"):
        return None
    return ToolChoice(None if tool_choice == "required" else tool_choice)
