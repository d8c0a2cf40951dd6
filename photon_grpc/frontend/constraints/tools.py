"""Calls of a caller's tools as a Lark grammar, in the syntax of the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from photon_grpc.core.ask import ChatInput, ConstraintAsk, Tool
from photon_grpc.core.call_form import CallForm
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.constraints.json_schema import exact_schema
from photon_grpc.frontend.output import reasoning

#: What a template gets as it is, where errors name the list; the entries of chat.tools are named by their index.
_JSON = "chat.tools_json"
_NAME_FIELD = "chat.tool_choice.name"
#: Characters of a caller's name, and number of names, in an error message.
_MAX_NAME, _MAX_NAMES = 100, 20
_NO_ARGUMENTS = msgspec.Raw(b'{"additionalProperties":false}')
_ANY_ARGUMENTS = msgspec.Raw(b'{"type":"object"}')
_Members = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class ConstrainedTool:
    """The definition of a tool by which a call is constrained."""

    name: str
    #: The JSON Schema of its arguments, which are an object.
    schema: _Members
    #: The field that errors about its arguments name.
    field: str

    @property
    def label(self) -> str:
        """The tool in words of an error message."""
        return _label(self.name)


def required_calls(chat: ChatInput, form: CallForm | None) -> ConstraintAsk | None:
    """Return the constraint by which a rendered chat's tool_choice is met, None if it sets none."""
    if chat.tool_choice is None:
        return None
    choices: tuple[str, ...] = () if chat.tool_choice.name is None else (chat.tool_choice.name,)
    if not chat.tools:
        return ConstraintAsk("tool_calls", chat.tools_json, choices, form)
    if chat.tool_choice.is_one and not choices:
        choices = tuple([tool.name for tool in chat.tools])
    tools = [{"name": tool.name, "parameters": _parameters(tool)} for tool in chat.tools]
    return ConstraintAsk("tool_calls", msgspec.json.encode(tools).decode(), choices, form, "chat.tools")


def _parameters(tool: Tool) -> msgspec.Raw:
    if tool.strict is False:
        return _ANY_ARGUMENTS
    return msgspec.Raw(tool.parameters_json.encode()) if tool.parameters_json else _NO_ARGUMENTS


def read_tools(ask: ConstraintAsk) -> tuple[ConstrainedTool, ...]:
    """Return the tools of required calls, or only the chosen ones, without a check of the others.

    Raise InvalidRequest.
    """
    field = ask.tools_field
    named: dict[str, tuple[_Members, str]] = {}
    for index, raw in enumerate(_read(ask.text, list[msgspec.Raw], field, "array")):
        its_name, definition = _definition(raw, f"{field}[{index}]")
        if its_name in named:
            raise _invalid(f"{field}[{index}]", f"there is another {_label(its_name)}; give each tool its own name")
        named[its_name] = definition, field if field == _JSON else f"{field}[{index}].parameters_json"
    if not named:
        raise _invalid(field, "there are no tools to choose from; set at least one")
    for name in ask.choices:
        if name not in named:
            raise InvalidRequest(f"{_NAME_FIELD}: {_none_of(name, [*named], field)}", field=_NAME_FIELD)
    return tuple([_tool(name, *named[name]) for name in ask.choices or named])


def _definition(raw: msgspec.Raw, where: str) -> tuple[str, _Members]:
    """Return a tool's name and its function, in the form of OpenAI's API or alone."""
    members = _members(raw, where)
    definition = _members(members["function"], f"{where}.function") if "function" in members else members
    name = _read(definition.get("name", b'""'), str, f"{where}.name", "string")
    if not name:
        raise _invalid(where, "has no name")
    return name, definition


def _none_of(name: str, names: list[str], field: str) -> str:
    known = ", ".join([each[:_MAX_NAME] for each in names][:_MAX_NAMES])
    return f"there is no {_label(name)}; {field.removeprefix('chat.')} has {known}"


def write_calls(tools: Sequence[ConstrainedTool], form: CallForm, options: Mapping[str, Any], *, is_one: bool) -> str:
    """Return the grammar of an output of calls of `tools`, or of a single call; `options` are those of its JSON."""
    syntax = form.syntax
    before, after, more = "", "", ""
    first, last = ('"[" ', ' "]"') if syntax.is_list else ("", "")
    if syntax.is_list:
        more = "" if is_one else ' (", " call)*'
    elif not syntax.is_bare:
        before, after = f"{syntax.open}\n", f"\n{syntax.close}"
        more = "" if is_one else ' ("\\n" call)*'
    rules = [f"start: {_REASONING[form.reasoning]}{first}call{more}{last}"]
    if form.reasoning != "none":
        rules.append(f'reasoning[suffix="{reasoning.CLOSE}"]: /(?s:.*)/')
    rules.append("call: " + " | ".join([f"call_{number}" for number in range(len(tools))]))
    for number, tool in enumerate(tools):
        beginning = f'{before}{{"name": {_quoted(tool.name)}, "{syntax.arguments}": '
        schema = exact_schema(msgspec.json.encode({**tool.schema, "x-guidance": options}).decode())
        rules.append(f"call_{number}: {_quoted(beginning)} arguments_{number} {_quoted('}' + after)}")
        rules.append(f"arguments_{number}: %json {schema}")
    return "\n".join(rules)


#: By CallForm.reasoning. Models end their reasoning with its mark and an empty line.
_REASONING = {
    "none": "",
    "optional": f'("{reasoning.OPEN}" reasoning /\\n{{1,2}}/?)? ',
    "open": "reasoning /\\n{1,2}/? ",
}


def _quoted(text: str) -> str:
    """Return `text` as a string literal of both JSON and Lark, which accepts no raw DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _tool(name: str, definition: _Members, field: str) -> ConstrainedTool:
    """Return a tool with the schema of its arguments, which are an object."""
    where = f"{field}: the parameters of the {_label(name)}"
    parameters = definition.get("parameters", _NO_ARGUMENTS)
    if bytes(parameters) == b"null":
        parameters = _NO_ARGUMENTS
    keywords = _members(parameters, where, field)
    kinds = _read(keywords.get("type", b'"object"'), str | list[str], f"{where}: type", "string", field)
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise _invalid(where, f"must be of type 'object', got {kinds!r:.100}", field)
    return ConstrainedTool(name, {**keywords, "type": msgspec.Raw(b'"object"')}, field)


def _members(raw: msgspec.Raw, where: str, field: str = _JSON) -> _Members:
    members: _Members = _read(raw, _Members, where, "object", field)
    return members


def _read(text: str | bytes | msgspec.Raw, kind: Any, where: str, name: str, field: str = _JSON) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise _invalid(where, f"must be a JSON {name}", field) from None


def _label(name: str) -> str:
    return f"tool {name[:_MAX_NAME]!r}"


def _invalid(where: str, problem: str, field: str = _JSON) -> InvalidRequest:
    return InvalidRequest(f"{where}: {problem}", field=field)
