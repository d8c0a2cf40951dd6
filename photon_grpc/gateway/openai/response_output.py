"""Answers of /v1/responses: the whole response, and its events, which are numbered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from photon_grpc.core.ask import Ask
from photon_grpc.core.generation import Start, Usage
from photon_grpc.frontend.output.update import OutputFinish, Result, Update
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.errors import Failure, OpenAiErrors
from photon_grpc.gateway.calls.parts import Blocks, Kind, OutputPart, OutputParts
from photon_grpc.gateway.openai.options import finish_reason


class WantedResponse(NamedTuple):
    """A response that a call asks for."""

    ask: Ask
    stream: bool
    #: Whatever follows after the first call is left out.
    has_one_call: bool
    #: Fields of the body that the response repeats.
    repeated: Mapping[str, Any]


def response_json(call: HttpCall, wanted: WantedResponse, result: Result) -> bytes:
    """Return a whole response."""
    (output,) = result.outputs
    items, parts = _Items(call.request_id), OutputParts(has_one_call=wanted.has_one_call)
    blocks = Blocks(parts, items)
    blocks.events(output)
    if (abort := parts.abort(output.finish)) is not None:
        raise abort
    items.finish(output.finish)
    blocks.close()
    response = _response(call, wanted, result.start)
    return msgspec.json.encode(response | _end(items, output.finish, result.usage))


def _response(call: HttpCall, wanted: WantedResponse, start: Start) -> dict[str, Any]:
    """Return a response that is about to be written."""
    return {
        "id": f"resp_{call.request_id}",
        "object": "response",
        "created_at": int(start.create_time_s),
        "model": start.model,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "metadata": {},
        "output": [],
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **wanted.repeated,
    }


def _end(items: _Items, finish: OutputFinish | None, usage: Usage) -> dict[str, Any]:
    status = _status(finish)
    return {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": items.done,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        },
    }


def _status(finish: OutputFinish | None) -> str:
    return "completed" if finish is not None and finish_reason(finish) == "stop" else "incomplete"


class ResponseEvents(OpenAiErrors):
    """The writer of a response's events, errors among them."""

    def __init__(self, call: HttpCall, wanted: WantedResponse) -> None:
        self._call = call
        self._wanted = wanted
        self._items = _Items(call.request_id)
        self._parts = OutputParts(has_one_call=wanted.has_one_call)
        self._blocks = Blocks(self._parts, self._items)
        self._response: dict[str, Any] = {}
        self._finish: OutputFinish | None = None

    async def write(self, number: int, start: Start, update: Update) -> None:
        events = b"" if self._response else self._begin(start)
        for delta in update.deltas:
            events += self._blocks.events(delta)
            self._finish = delta.finish or self._finish
        abort = None
        if update.timing is not None:
            abort = self._parts.abort(self._finish)
            events += self._ending(update, is_aborted=abort is not None)
        if events:
            await self._call.events.write(events)
        if abort is not None:
            raise abort

    def event(self, failure: Failure) -> bytes:
        # OpenAI's clients raise an error for `error`; its documents have the fields beside it.
        fields = self.fields(failure)
        beside = {name: fields[name] for name in ("code", "message", "param")}
        return self._items.event("error", beside | {"error": fields})

    def _begin(self, start: Start) -> bytes:
        self._response = _response(self._call, self._wanted, start)
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._items.event(kind, {"response": self._response}) for kind in kinds])

    def _ending(self, update: Update, *, is_aborted: bool) -> bytes:
        self._items.finish(self._finish)
        closed = self._blocks.close()
        if is_aborted:
            return closed  # the error follows
        end = _end(self._items, self._finish, update.usage or Usage())
        return closed + self._items.event(f"response.{end['status']}", {"response": self._response | end})


class _Items:
    """The items of a response, and the form of their events."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._num_events = 0
        self._texts: list[str] = []
        self._kind: Kind = "text"
        self._item: dict[str, Any] = {}
        #: Of the open item.
        self._place: dict[str, Any] = {}
        self._last_status = "completed"
        #: Items that are complete.
        self.done: list[dict[str, Any]] = []

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        whole = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(whole))

    def finish(self, finish: OutputFinish | None) -> None:
        """Note how the output ended; its last item ended with it."""
        self._last_status = _status(finish)

    def opened(self, part: OutputPart) -> bytes:
        index = len(self.done)
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[part.kind]
        self._kind, self._texts = part.kind, []
        self._item = {"id": f"{prefix}_{self._request_id}_{index}", **_fields(part), "status": "in_progress"}
        self._place = {"item_id": self._item["id"], "output_index": index}
        added = self.event("response.output_item.added", {"output_index": index, "item": self._item})
        if part.kind == "call":
            return added
        self._place["content_index"] = 0
        return added + self.event("response.content_part.added", {**self._place, "part": self._content("")})

    def more(self, part: OutputPart) -> bytes:
        text = part.text if part.call is None else part.call.arguments_json
        self._texts.append(text)
        fields = {**self._place, "delta": text}
        return self.event(f"{_EVENTS[part.kind]}.delta", fields | _LOGPROBS if part.kind == "text" else fields)

    def closed(self) -> bytes:
        text = "".join(self._texts)
        status = "completed" if self._kind == "call" else self._last_status
        if self._kind == "call":
            events = self.event(f"{_EVENTS['call']}.done", {**self._place, "arguments": text})
            item = {**self._item, "arguments": text, "status": status}
        else:
            content = self._content(text)
            done = {**self._place, "text": text}
            events = self.event(f"{_EVENTS[self._kind]}.done", done | _LOGPROBS if self._kind == "text" else done)
            events += self.event("response.content_part.done", {**self._place, "part": content})
            item = {**self._item, "content": [content], "status": status}
        events += self.event("response.output_item.done", {"output_index": len(self.done), "item": item})
        self.done.append(item)
        return events

    def _content(self, text: str) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], **_LOGPROBS}


_LOGPROBS: dict[str, Any] = {"logprobs": []}
_EVENTS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


def _fields(part: OutputPart) -> dict[str, Any]:
    """Return the fields of an item that is about to be written."""
    if part.call is not None:
        return {"type": "function_call", "call_id": part.call.id, "name": part.call.name, "arguments": ""}
    if part.kind == "text":
        return {"type": "message", "role": "assistant", "content": []}
    return {"type": "reasoning", "summary": [], "content": []}
