"""Answers in Anthropic's form: a whole message, and the events of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from photon_grpc.core.ask import Ask
from photon_grpc.core.generation import Start, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.frontend.output.update import OutputFinish, Result, Update
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.parts import Blocks, OutputPart, OutputParts


class WantedMessage(NamedTuple):
    """A message that a call asks for."""

    ask: Ask
    stream: bool
    #: Whatever follows after the first call is left out.
    has_one_call: bool
    shows_thinking: bool


def message_json(call: HttpCall, wanted: WantedMessage, result: Result) -> bytes:
    """Return a whole message."""
    (output,) = result.outputs
    parts = OutputParts(has_one_call=wanted.has_one_call)
    content = [_block(call, wanted, part) for part in parts.of(output)]
    if (abort := parts.abort(output.finish)) is not None:
        raise abort
    message = _message(call, result.start) | {"content": content, "usage": _usage(result.usage)}
    return msgspec.json.encode(message | _end(output.finish, parts))


def _message(call: HttpCall, start: Start) -> dict[str, Any]:
    """Return a message that is about to be written."""
    return {
        "id": f"msg_{call.request_id}",
        "type": "message",
        "role": "assistant",
        "model": start.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.output_tokens,
    }


def _block(call: HttpCall, wanted: WantedMessage, part: OutputPart) -> dict[str, Any]:
    if part.call is not None:
        return {**_empty_block(part), "input": msgspec.Raw(part.call.arguments_json.encode())}
    if part.kind == "text":
        return {**_empty_block(part), "text": part.text}
    thinking = part.text if wanted.shows_thinking else ""
    return {"type": "thinking", "thinking": thinking, "signature": _signature(call)}


def _empty_block(part: OutputPart) -> dict[str, Any]:
    if part.call is not None:
        return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
    if part.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _signature(call: HttpCall) -> str:
    """Return what clients keep of a thinking block. Nothing here checks it, and they drop blocks without one."""
    return f"photon-{call.request_id}"


def _end(finish: OutputFinish | None, parts: OutputParts) -> dict[str, str | None]:
    if finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    return {"stop_reason": _stop_reason(finish, parts), "stop_sequence": finish.stop_string}


def _stop_reason(finish: OutputFinish, parts: OutputParts) -> str:
    if parts.is_full:
        return "tool_use"
    match finish.reason:
        case FinishReason.STOP_STRING:
            return "stop_sequence"
        case FinishReason.CONTEXT_LENGTH:
            return "model_context_window_exceeded"
        case FinishReason.MAX_TOKENS | FinishReason.TIME_LIMIT:
            return "max_tokens"
    return "tool_use" if parts.has_calls else "end_turn"


class MessageEvents:
    """The writer of a message's events."""

    def __init__(self, call: HttpCall, wanted: WantedMessage) -> None:
        self._call = call
        self._parts = OutputParts(has_one_call=wanted.has_one_call)
        self._blocks = Blocks(self._parts, _BlockEvents(_signature(call), shows_thinking=wanted.shows_thinking))
        self._has_begun = False
        self._finish: OutputFinish | None = None

    async def write(self, number: int, start: Start, update: Update) -> None:
        events = b"" if self._has_begun else self._begin(start, update)
        for delta in update.deltas:
            events += self._blocks.events(delta)
            self._finish = delta.finish or self._finish
        abort = None
        if update.timing is not None:
            abort = self._parts.abort(self._finish)
            events += self._blocks.close() + (b"" if abort else self._ending(update))
        if events:
            await self._call.events.write(events)
        if abort is not None:
            raise abort

    def _begin(self, start: Start, update: Update) -> bytes:
        self._has_begun = True
        usage = _usage(update.usage or Usage()) | {"output_tokens": 0}
        return _event("message_start", {"message": _message(self._call, start) | {"usage": usage}})

    def _ending(self, update: Update) -> bytes:
        usage = _usage(update.usage or Usage())
        ending = {"delta": _end(self._finish, self._parts), "usage": usage}
        return _event("message_delta", ending) + _event("message_stop", {})


class _BlockEvents:
    """The form of a block's events."""

    def __init__(self, signature: str, *, shows_thinking: bool) -> None:
        self._signature = signature
        self._shows_thinking = shows_thinking
        self._index = -1
        self._is_thinking = False
        #: Everything of a delta before its text.
        self._before = b""

    def opened(self, part: OutputPart) -> bytes:
        self._index += 1
        self._is_thinking = part.kind == "reasoning"
        kind, key = _DELTAS[part.kind]
        head = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":' % (self._index, kind, key)
        self._before = b"event: content_block_delta\ndata: " + head
        return _event("content_block_start", {"index": self._index, "content_block": _empty_block(part)})

    def more(self, part: OutputPart) -> bytes:
        if self._is_thinking and not self._shows_thinking:
            return b""
        text = part.text if part.call is None else part.call.arguments_json
        return self._before + msgspec.json.encode(text) + b"}}\n\n"

    def closed(self) -> bytes:
        stop = _event("content_block_stop", {"index": self._index})
        if not self._is_thinking:
            return stop
        delta = {"type": "signature_delta", "signature": self._signature}
        return _event("content_block_delta", {"index": self._index, "delta": delta}) + stop


_DELTAS = {
    "text": (b"text_delta", b"text"),
    "reasoning": (b"thinking_delta", b"thinking"),
    "call": (b"input_json_delta", b"partial_json"),
}


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
