"""The JSON in a chat, which is parsed within limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from photon_grpc.core.ask import ChatInput
from photon_grpc.core.json_fault import json_fault
from photon_grpc.errors import InvalidRequest

#: For all JSON of one chat together.
MAX_JSON_BYTES = 2**20
MAX_JSON_NODES = 2**16
#: Nesting of arrays and objects, which code may walk by recursion.
MAX_JSON_DEPTH = 64


def check_json(chat: ChatInput) -> None:
    """Check the size of a chat's JSON before it is parsed. Raise InvalidRequest naming the field that exceeds a limit.

    Nodes are counted by the characters that begin one: a comma, a colon or a bracket, even in strings.
    """
    num_bytes = num_nodes = 0
    for field, text in json_fields(chat):
        num_bytes += len(text) if len(text) > MAX_JSON_BYTES else len(text.encode(errors="surrogatepass"))
        _check_sum(field, "bytes", num_bytes, MAX_JSON_BYTES)
        num_nodes += 1 + sum([text.count(mark) for mark in ",:[{"])
        _check_sum(field, "nodes", num_nodes, MAX_JSON_NODES)


def parsed(text: str, kind: type, field: str) -> Any:
    """Return the JSON value in `text`, an empty `kind` if `text` is empty."""
    if not text:
        return kind()
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep(field) from None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{field}: not valid JSON: {json_fault(error)}", field=field) from None
    if not isinstance(value, kind):
        raise InvalidRequest(f"{field}: must be a JSON {'object' if kind is dict else 'array'}", field=field)
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for holder in level for item in _items(holder) if isinstance(item, (dict, list))]
        if not level:
            return value
    raise _too_deep(field)


def _items(holder: Any) -> Iterable[Any]:
    return holder.values() if isinstance(holder, dict) else holder


def _too_deep(field: str) -> InvalidRequest:
    needed = MAX_JSON_DEPTH + 1
    message = f"{field}: the JSON is nested at least {needed} deep; {MAX_JSON_DEPTH} are allowed"
    return InvalidRequest(message, field=field, needed=needed, limit=MAX_JSON_DEPTH)


def json_fields(chat: ChatInput) -> Iterator[tuple[str, str]]:
    """Yield every text of a chat that is JSON or becomes a string of JSON, each with the field that holds it."""
    yield "chat.template_args_json", chat.template_args_json
    yield "chat.tools_json", chat.tools_json
    for i, tool in enumerate(chat.tools):
        yield f"chat.tools[{i}].description", tool.description
        yield f"chat.tools[{i}].parameters_json", tool.parameters_json
    for i, message in enumerate(chat.messages):
        if message.tool_calls_json:
            yield f"chat.messages[{i}].tool_calls_json", message.tool_calls_json
        if message.tool_calls:
            for j, call in enumerate(message.tool_calls):
                yield f"chat.messages[{i}].tool_calls[{j}].arguments_json", call.arguments_json


def texts_of(chat: ChatInput) -> list[str]:
    """Return every text of a chat that `json_fields` leaves out."""
    texts = [text for m in chat.messages for text in (m.role, m.content, m.name, m.tool_call_id)]
    texts += [tool.name for tool in chat.tools]
    calls = [call for m in chat.messages if m.tool_calls for call in m.tool_calls]
    return texts + [text for call in calls for text in (call.id, call.name)]


def _check_sum(field: str, what: str, needed: int, limit: int) -> None:
    if needed > limit:
        message = f"with it the chat has {needed} {what} of JSON; {limit} are allowed"
        raise InvalidRequest(message, field=field, needed=needed, limit=limit)
