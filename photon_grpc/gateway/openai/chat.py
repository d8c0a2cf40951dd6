"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from photon_grpc.core.ask import Ask, Origin
from photon_grpc.core.generation import Start, ToolCall
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.output.answer import NO_ANSWER
from photon_grpc.frontend.output.update import OutputDelta, Result, Update
from photon_grpc.gateway.calls import generation
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.fields import Accepted, Refused, Supported, Table, Values, groups, names
from photon_grpc.gateway.calls.guard import Endpoint
from photon_grpc.gateway.openai.answers import chat_logprobs, head_of, off_the_loop, usage_of
from photon_grpc.gateway.openai.messages import chat_of, without_effect
from photon_grpc.gateway.openai.options import (
    SHARED,
    EventOptions,
    finish_reason,
    form_of,
    stop_reason,
    stream_options,
)

FIELDS: Table = {
    **SHARED,
    "messages": Supported(list[dict[str, Any]]),
    "max_completion_tokens": Supported(int, "max_tokens"),
    "max_tokens": Supported(int, "max_tokens", note="the older name of max_completion_tokens"),
    "logprobs": Supported(bool),
    "top_logprobs": Supported(int),
    "tools": Supported(list[dict[str, Any]]),
    "tool_choice": Supported(Any),
    "parallel_tool_calls": Supported(bool, note="false needs a tool_choice other than auto"),
    "reasoning_effort": Supported(str, note="a variable of the chat template; without effect if it has none"),
    "thinking_token_budget": Refused("reasoning ends where the model ends it; see max_completion_tokens"),
    "chat_template_kwargs": Supported(dict[str, Any], note="variables of the chat template"),
    "add_generation_prompt": Supported(bool),
    "modalities": Refused("this server writes text", (["text"],)),
    "audio": Refused("this server writes text"),
    "prediction": Accepted("a prediction may make an answer faster, never different"),
    "verbosity": Refused("ask for it in a message", ("medium",)),
    "web_search_options": Refused("this server searches nothing"),
    "functions": Refused("tools is its newer name", ([],)),
    "function_call": Refused("tool_choice is its newer name", ("auto", "none")),
    "continue_final_message": Refused("a message cannot be continued here", (False,)),
    "add_special_tokens": Refused("the chat template writes them", (False,)),
    "echo": Refused("the prompt of a chat is not repeated", (False,)),
    "include_reasoning": Refused("reasoning is always reported, in a field of its own", (True,)),
    "chat_template": Refused("the model's own template is used"),
    "documents": Refused("pass documents in chat_template_kwargs", ([],)),
}
_NAMES = names(FIELDS) | {
    "request_id": "x-request-id",
    "stop.max_tokens": "max_completion_tokens",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.template_args_json": "chat_template_kwargs",
    "output.logprobs": "top_logprobs",
    "output.score_token_ids": "logprob_token_ids",
}


@dataclass(frozen=True, slots=True)
class _WantedChat:
    """A call, read and checked."""

    ask: Ask
    stream: bool
    options: EventOptions
    has_logprobs: bool


class ChatCompletions(generation.FrontendEndpoints):
    """The endpoint."""

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("/v1/chat/completions", self.answer, scopes=("generate",), names=_NAMES),)

    async def answer(self, call: HttpCall) -> Response | None:
        wanted = await generation.read_request(
            call, self._frontend, FIELDS, self._max_body_bytes, partial(_wanted, call)
        )
        if not wanted.stream:
            (result,) = await generation.gather(self._frontend, (wanted.ask,))
            num_scored = sum(output.scores.num_ids for output in result.outputs)
            body = await off_the_loop(partial(_body, call, wanted, result), num_scored)
            return Response(body, media_type="application/json")
        chunks = _ChatChunks(call, wanted)
        await generation.stream(self._frontend, (wanted.ask,), chunks.write)
        await call.events.write(b"data: [DONE]\n\n")
        return None


def _wanted(call: HttpCall, values: Values, facts: ModelFacts, origin: Origin) -> _WantedChat:
    if user := values.get("user"):
        generation.label(origin, user)
    chat = chat_of(values.supported, facts.template_arguments)
    call.note_ignored((*values.ignored, *without_effect(values.supported, facts.template_arguments)))
    constraint = form_of(values.supported, call)
    return _WantedChat(
        generation.ask_of(call, origin, chat, _options(values), model=facts.name, constraint=constraint),
        bool(values.get("stream")),
        stream_options(values),
        bool(values.get("logprobs")),
    )


def _options(values: Values) -> dict[str, dict[str, Any]]:
    """Return the options of the ask by group. Raise InvalidRequest, FeatureNotSupported."""
    options = groups(FIELDS, values.supported)
    if values.get("logprobs"):
        options.setdefault("output", {})["logprobs"] = values.get("top_logprobs", 0)
    else:
        _check_unscored(values)
    if (
        values.get("parallel_tool_calls") is False
        and values.get("tools")
        and values.get("tool_choice") in (None, "auto")
    ):
        message = 'parallel_tool_calls: false needs a tool_choice of "required", "none" or a tool'
        raise FeatureNotSupported(message, field="parallel_tool_calls")
    options.setdefault("cache", {}).update(generation.cache_of(values.get("user", ""), values.get("cache_salt", "")))
    if stream_options(values).continuous_usage_stats:
        options["stream"] = {"continuous_usage": True}
    return options


def _check_unscored(values: Values) -> None:
    for name in ("top_logprobs", "logprob_token_ids"):
        if values.get(name):
            raise InvalidRequest(f"{name}: needs logprobs: true", field=name)


# --- the whole answer ------------------------------------------------------------------------------------------------


def _body(call: HttpCall, wanted: _WantedChat, result: Result) -> bytes:
    head = head_of(f"chatcmpl-{call.request_id}", "chat.completion", result.start)
    choices = [_choice(wanted, output) for output in result.outputs]
    return msgspec.json.encode(head | {"choices": choices, "usage": usage_of([result.usage])})


def _choice(wanted: _WantedChat, output: OutputDelta) -> dict[str, Any]:
    calls = output.tool_calls
    content = output.text if output.answer is NO_ANSWER else output.content
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
    message["refusal"] = None
    if output.reasoning:
        message["reasoning_content"] = output.reasoning
    if calls:
        message["tool_calls"] = [_call(each) for each in calls]
    logprobs = {"content": chat_logprobs(output.scores), "refusal": None} if wanted.has_logprobs else None
    return {"index": output.index, "message": message, "logprobs": logprobs} | _end_of(output, bool(calls))


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


def _end_of(output: OutputDelta, has_calls: bool) -> dict[str, Any]:
    finish = output.finish
    if finish is None:
        return {"finish_reason": None}
    reason = finish_reason(finish)
    return {
        "finish_reason": "tool_calls" if has_calls and reason == "stop" else reason,
        "stop_reason": stop_reason(finish),
    }


# --- chunks of a stream ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ChatChoice:
    """The state of one choice of a stream."""

    #: Everything of a plain chunk before its text.
    before: bytes
    has_calls: bool = False


@dataclass(slots=True)
class _ChatChunks:
    """The writer of a stream's chunks."""

    call: HttpCall
    wanted: _WantedChat
    _head: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, _ChatChoice] = field(default_factory=dict)

    async def write(self, number: int, start: Start, update: Update) -> None:
        if not self._head:
            self._head = head_of(f"chatcmpl-{self.call.request_id}", "chat.completion.chunk", start)
            if self.wanted.options.include_usage:
                self._head["usage"] = None
        num_scored = sum(delta.scores.num_ids for delta in update.deltas)
        events = await off_the_loop(lambda: self._events_of(update), num_scored)
        if update.timing is not None and self.wanted.options.include_usage and update.usage is not None:
            events += self._event({"choices": [], "usage": usage_of([update.usage])})
        if events:
            await self.call.events.write(events)

    def _events_of(self, update: Update) -> bytes:
        return b"".join([self._events(update, delta) for delta in update.deltas])

    def _events(self, update: Update, delta: OutputDelta) -> bytes:
        choice = self._choices.get(delta.index)
        is_plain = delta.answer is NO_ANSWER and delta.finish is None and not self.wanted.has_logprobs
        if choice is not None and is_plain and not self.wanted.options.continuous_usage_stats:
            return choice.before + msgspec.json.encode(delta.text) + _AFTER if delta.text else b""
        first = b""
        if choice is None:
            head = msgspec.json.encode(self._head)[:-1]
            choice = _ChatChoice(b"data: " + head + b',"choices":[{"index":%d,"delta":{"content":' % delta.index)
            self._choices[delta.index] = choice
            first = self._chunk(update, delta.index, {"role": "assistant", "content": ""}, {})
        return first + self._full(update, delta, choice)

    def _full(self, update: Update, delta: OutputDelta, choice: _ChatChoice) -> bytes:
        new: dict[str, Any] = {}
        if delta.reasoning:
            new["reasoning_content"] = delta.reasoning
        if content := delta.text if delta.answer is NO_ANSWER else delta.content:
            new["content"] = content
        if delta.tool_calls:
            choice.has_calls = True
            new["tool_calls"] = [{"index": each.index} | _call(each) for each in delta.tool_calls]
        rest = _end_of(delta, choice.has_calls)
        if self.wanted.has_logprobs:
            rest["logprobs"] = {"content": chat_logprobs(delta.scores), "refusal": None}
        if not new and delta.finish is None and not self.wanted.has_logprobs:
            return b""
        return self._chunk(update, delta.index, new, rest)

    def _chunk(self, update: Update, index: int, delta: Mapping[str, Any], rest: Mapping[str, Any]) -> bytes:
        whole: dict[str, Any] = {
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **rest}]
        }
        if self.wanted.options.continuous_usage_stats and update.usage is not None:
            whole["usage"] = usage_of([update.usage])
        return self._event(whole)

    def _event(self, whole: Mapping[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode({**self._head, **whole}) + b"\n\n"


_AFTER = b'},"logprobs":null,"finish_reason":null}]}\n\n'
