"""Calls of a caller's tools as a Lark grammar, in the syntax of the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from photon_grpc.core.call_form import CallForm
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.constraints.json_schema import exact_schema
from photon_grpc.frontend.output import reasoning

FIELD = "chat.tools_json"
_NAME_FIELD = "chat.tool_choice.name"
#: Characters of a caller's name, and number of names, in an error message.
_MAX_NAME, _MAX_NAMES = 100, 20
_NO_ARGUMENTS = msgspec.Raw(b'{"additionalProperties":false}')
_Members = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Tool:
    """The definition of a tool by which a call is constrained."""

    name: str
    #: The JSON Schema of its arguments, which are an object.
    schema: _Members

    @property
    def label(self) -> str:
        """The tool in words of an error message."""
        return _label(self.name)


def read_tools(tools_json: str, name: str | None = None) -> tuple[Tool, ...]:
    """Return the tools of a chat, or only the one of `name`, without a check of the others. Raise InvalidRequest."""
    named: dict[str, _Members] = {}
    for index, raw in enumerate(_read(tools_json, list[msgspec.Raw], FIELD, "array")):
        where = f"{FIELD}[{index}]"
        members = _members(raw, where)
        # In the form of OpenAI's API, or the function alone.
        definition = _members(members["function"], f"{where}.function") if "function" in members else members
        its_name = _read(definition.get("name", b'""'), str, f"{where}.name", "string")
        if not its_name:
            raise _invalid(where, "has no name")
        if its_name in named:
            raise _invalid(where, f"there is another {_label(its_name)}; give each tool its own name")
        named[its_name] = definition
    if not named:
        raise _invalid(FIELD, "there are no tools to choose from; set at least one")
    if name is not None and name not in named:
        known = ", ".join([each[:_MAX_NAME] for each in named][:_MAX_NAMES])
        raise InvalidRequest(f"{_NAME_FIELD}: there is no {_label(name)}; tools_json has {known}", field=_NAME_FIELD)
    return tuple([Tool(each, _schema(each, named[each])) for each in (named if name is None else (name,))])


def write_calls(tools: Sequence[Tool], form: CallForm, options: Mapping[str, Any], *, is_one: bool) -> str:
    """Return the grammar of an output of calls of `tools`, or of a single call; `options` are those of its JSON."""
    syntax = form.syntax
    before, after, more = "", "", ""
    if not syntax.is_bare:
        before, after = f"{syntax.open}\n", f"\n{syntax.close}"
        more = "" if is_one else ' ("\\n" call)*'
    rules = [f"start: {_REASONING[form.reasoning]}call{more}"]
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


def _schema(name: str, definition: _Members) -> _Members:
    """Return the schema of a call's arguments, which are an object."""
    where = f"{FIELD}: the parameters of the {_label(name)}"
    parameters = definition.get("parameters", _NO_ARGUMENTS)
    if bytes(parameters) == b"null":
        parameters = _NO_ARGUMENTS
    keywords = _members(parameters, where)
    kinds = _read(keywords.get("type", b'"object"'), str | list[str], f"{where}: type", "string")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise _invalid(where, f"must be of type 'object', got {kinds!r:.100}")
    return {**keywords, "type": msgspec.Raw(b'"object"')}


def _members(raw: msgspec.Raw, where: str) -> _Members:
    members: _Members = _read(raw, _Members, where, "object")
    return members


def _read(text: str | bytes | msgspec.Raw, kind: Any, where: str, name: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise _invalid(where, f"must be a JSON {name}") from None


def _label(name: str) -> str:
    return f"tool {name[:_MAX_NAME]!r}"


def _invalid(where: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {problem}", field=FIELD)
