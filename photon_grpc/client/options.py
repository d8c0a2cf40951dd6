"""Keyword options into a GenerateRequest. Options are named like the fields of the proto, wherever they stand in it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypedDict, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from photon_grpc.client.message_type import write_message_type
from photon_grpc.core.generation import Prompt
from photon_grpc.core.object_type import object_type_of
from photon_grpc.core.option_names import unknown_option
from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb


class Options(TypedDict, total=False):
    """Unset means the model's defaults. docs/api.md says what each means; durations are seconds."""

    model: str
    request_id: str
    parse_special_tokens: bool
    continue_from: Sequence[int]
    # SamplingParams
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    num_outputs: int
    # StopParams
    max_tokens: int
    min_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_text: bool
    max_duration: float
    # StructuredOutput: one of them; json_schema may be a Pydantic model class or a dataclass, message_type is a
    # generated class, for `protobuf`
    json_schema: str | Mapping[str, Any] | type
    json_object: bool
    regex: str
    choices: Sequence[str]
    grammar: str
    message_type: type[Message]
    # OutputOptions: what comes back, not the prompt
    text: bool
    token_ids: bool
    prompt_token_ids: bool
    logprobs: int
    prompt_logprobs: int
    score_token_ids: Sequence[int]
    skip_special_tokens: bool
    # CacheOptions
    session_id: str
    salt: str
    bypass_prefix_cache: bool
    # SchedulingOptions; timeout is the deadline of the call, too
    priority: int
    max_queue_duration: float
    timeout: float
    # StreamOptions
    min_interval: float
    max_tokens_per_message: int
    continuous_usage: bool
    # ChatInput, beside the messages
    template_args_json: str
    tools_json: str
    #: "auto" (unset), "required" or the name of the tool that is called.
    tool_choice: str
    add_generation_prompt: bool


_GROUPS = ("sampling", "stop", "structured_output", "output", "cache", "scheduling", "stream", "chat")


def build_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Raise InvalidRequest for a value that its field cannot hold, TypeError for an option that there is none of and a
    list of prompts."""
    request = pb.GenerateRequest()
    write_prompt(request, prompt)
    object_type = object_type_of(options)
    for name, value in options.items():
        if value is None:
            continue
        if name == "json_schema" and object_type is not None:
            value = object_type.schema
        if group_of(name) == "structured_output":
            _write_constraint(request.structured_output, name, value)
            continue
        group = group_of(name)
        if group == "chat" and request.WhichOneof("input") != "chat":
            raise InvalidRequest(f"{name} needs a chat: a list of messages as the prompt", field=f"chat.{name}")
        if name == "tool_choice":
            _write_tool_choice(request.chat, value)
        else:
            write_field(getattr(request, group) if group else request, name, value, group)
    return request


def write_prompt(request: Any, prompt: Prompt) -> None:
    """Into the `input` of a GenerateRequest or TokenizeRequest. Raise InvalidRequest; TypeError for several prompts."""
    if isinstance(prompt, str):
        write_field(request, "text", prompt)
    elif isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise InvalidRequest(
            f"the prompt is text, token ids or a list of chat messages, not {type(prompt).__name__}", field="input"
        )
    elif len(prompt) and _is_list(prompt[0]):
        raise TypeError(f"a call takes one prompt, not a list of {len(prompt)}; client.map(prompts, ...) takes a list")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        for index, message in enumerate(cast(Sequence[Mapping[str, Any]], prompt)):
            _write_chat_message(request.chat.messages.add(), message, f"chat.messages[{index}]")
    elif "token_ids" in request.DESCRIPTOR.fields_by_name:
        request.token_ids.SetInParent()
        write_field(request.token_ids, "ids", prompt, "token_ids")
    else:
        raise InvalidRequest("the prompt is neither text nor a list of chat messages", field="input")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, bytes)


def write_field(message: Message, name: str, value: Any, path: str = "") -> None:
    """Set one field from its Python value; None leaves it unset. Raise InvalidRequest."""
    target = getattr(message, name)
    try:
        if isinstance(target, Duration):
            target.FromTimedelta(timedelta(seconds=value))
        elif isinstance(target, pb.TokenIds):
            target.SetInParent()
            target.ids.extend(value)
        elif hasattr(target, "update"):
            target.update(value)
        elif hasattr(target, "extend"):
            if isinstance(value, str):
                raise TypeError("one string, not a list of them")
            target.extend(value)
        elif isinstance(value, bool) and not isinstance(target, bool):
            raise TypeError("this field is not a boolean")
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, OverflowError, AttributeError) as problem:
        field = f"{path}.{name}" if path else name
        raise InvalidRequest(f"{field}: {reprlib.repr(value)} does not fit ({problem})", field=field) from problem


@cache
def group_of(name: str) -> str:
    """The message of GenerateRequest that holds an option; "" for its own fields. Raise TypeError."""
    if name not in Options.__annotations__:
        raise TypeError(unknown_option(name, Options.__annotations__))
    fields = pb.GenerateRequest.DESCRIPTOR.fields_by_name
    if name == "message_type":
        return "structured_output"
    for group in _GROUPS:
        message = fields[group].message_type
        if message is not None and name in message.fields_by_name:
            return group
    return ""


def _write_constraint(target: pb.StructuredOutput, name: str, value: Any) -> None:
    path, other = f"structured_output.{name}", target.WhichOneof("constraint")
    if other is not None:
        raise InvalidRequest(f"{path}: {other} is set, too; an output has one constraint", field=path)
    if name == "message_type":
        write_message_type(target.protobuf, value)
    elif name == "json_object":
        if value:
            target.json_object.SetInParent()
    elif name == "choices":
        target.choices.SetInParent()
        write_field(target.choices, "values", value, path)
    else:
        write_field(target, name, _json(value, path) if isinstance(value, Mapping) else value, "structured_output")


def _write_tool_choice(chat: pb.ChatInput, choice: Any) -> None:
    if choice == "required":
        chat.tool_choice.required.SetInParent()
    elif choice != "auto":
        write_field(chat.tool_choice, "name", choice, "chat.tool_choice")


def _json(schema: Mapping[str, Any], path: str) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path}: is not JSON: {error}", field=path) from None


def _write_chat_message(target: pb.ChatMessage, message: Mapping[str, Any], path: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{path} is not a message but {type(message).__name__}", field=path)
    for key, value in message.items():
        if key not in pb.ChatMessage.DESCRIPTOR.fields_by_name:
            known = ", ".join(pb.ChatMessage.DESCRIPTOR.fields_by_name)
            raise InvalidRequest(f"{path} has no {key!r}; a message has {known}", field=f"{path}.{key}")
        write_field(target, key, value, path)
