"""Keyword options, written into a GenerateRequest. An option has the name of its proto field, in whatever message."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from photon_grpc.client.chat import write_messages, write_tools
from photon_grpc.client.field_values import NO_LISTS, plain, write_field
from photon_grpc.client.message_type import write_message_type
from photon_grpc.core.fields import FIELDS, fields_of
from photon_grpc.core.generation import Prompt
from photon_grpc.core.object_type import object_type_of
from photon_grpc.core.option_names import unknown_option
from photon_grpc.errors import InvalidRequest
from photon_grpc.v1 import inference_pb2 as pb

_OF_CHAT = frozenset(field.name for field in fields_of("chat"))


def build_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return the request. Raise InvalidRequest for a bad value, TypeError for an unknown option or several prompts."""
    request = pb.GenerateRequest()
    write_prompt(request, prompt)
    write_options(request, options)
    return request


def write_options(request: pb.GenerateRequest, options: Mapping[str, Any]) -> None:
    """Write options into a request that has its prompt. Raise what `build_request` raises."""
    object_type = object_type_of(options)
    for name, value in options.items():
        if value is None:
            continue
        if name == "json_schema" and object_type is not None:
            value = object_type.schema
        _write_option(request, name, plain(value))


def write_chat_options(request: Any, options: Mapping[str, Any]) -> None:
    """Write options of a chat into a TokenizeRequest that has its prompt. Raise InvalidRequest, TypeError."""
    check_options(options, _OF_CHAT)
    for name, value in options.items():
        if value is not None:
            _write_option(request, name, plain(value))


def _write_option(request: Any, name: str, value: Any) -> None:
    group = group_of(name)
    if group == "structured_output":
        _write_constraint(request.structured_output, name, value)
    elif group == "chat" and request.WhichOneof("input") != "chat":
        raise InvalidRequest(f"{name} needs a chat: a list of messages as the prompt", field=f"chat.{name}")
    elif name == "tool_choice":
        _write_tool_choice(request.chat, value)
    elif name == "tools":
        write_tools(request.chat, value)
    else:
        try:
            write_field(getattr(request, group) if group else request, name, value, group)
        except InvalidRequest:
            # A number that protobuf cannot hold is refused in the server's words.
            if type(value) is int and (field := FIELDS[name]).bounds is not None:
                field.check(value)
            raise


def check_options(options: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError for an option that is not among `known`."""
    for name in options.keys() - known:
        raise TypeError(f"{unknown_option(name, known)}; there are {', '.join(sorted(known))}")


def write_prompt(request: Any, prompt: Prompt) -> None:
    """Write the input of a GenerateRequest or TokenizeRequest. Raise InvalidRequest, TypeError for several prompts."""
    prompt = plain(prompt)
    if isinstance(prompt, str):
        write_field(request, "text", prompt)
    elif isinstance(prompt, NO_LISTS) or not isinstance(prompt, Sequence):
        raise InvalidRequest(
            f"the prompt is text, token ids or a list of chat messages, not {type(prompt).__name__}", field="input"
        )
    elif len(prompt) and _is_list(prompt[0]):
        raise TypeError(f"a call takes one prompt, not a list of {len(prompt)}; client.map(prompts, ...) takes a list")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        write_messages(request.chat, cast(Sequence[Mapping[str, Any]], prompt))
    elif "token_ids" in request.DESCRIPTOR.fields_by_name:
        request.token_ids.SetInParent()
        write_field(request.token_ids, "ids", prompt, "token_ids")
    else:
        raise InvalidRequest("the prompt is neither text nor a list of chat messages", field="input")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, NO_LISTS)


def group_of(name: str) -> str:
    """Return the field of GenerateRequest whose message holds an option; "" for its own fields. Raise TypeError."""
    field = FIELDS.get(name)
    if field is None:
        raise TypeError(unknown_option(name, FIELDS))
    return field.group


def _write_constraint(target: pb.StructuredOutput, name: str, value: Any) -> None:
    path, other = f"structured_output.{name}", target.WhichOneof("constraint")
    if other is not None:
        raise InvalidRequest(f"{path}: {other} is set, too; an output has one constraint", field=path)
    if name == "message_type":
        write_message_type(target.protobuf, value)
    elif name == "json_object":
        if not isinstance(value, bool):
            raise InvalidRequest(f"{path}: {reprlib.repr(value)} is not a boolean", field=path)
        if value:
            target.json_object.SetInParent()
    elif name == "choices":
        target.choices.SetInParent()
        write_field(target.choices, "values", value, path)
    else:
        is_schema = name == "json_schema" and isinstance(value, Mapping)
        write_field(target, name, _json(value, path) if is_schema else value, "structured_output")


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
