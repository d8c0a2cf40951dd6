"""POST /v1/responses, without anything that would be stored between calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from photon_grpc.core.ask import Origin
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.gateway.calls import generation
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.fields import Accepted, Refused, Supported, Table, Values, groups, names
from photon_grpc.gateway.calls.guard import Endpoint
from photon_grpc.gateway.openai.options import SHARED
from photon_grpc.gateway.openai.response_input import ReasoningOptions, TextOptions, chat_of, constraint_of
from photon_grpc.gateway.openai.response_output import ResponseEvents, WantedResponse, response_json

_SHARED = (
    *("model", "stream", "user", "temperature", "top_p", "metadata", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "speculation"),
)
_NOTHING_STORED = "nothing is stored; send all items"

FIELDS: Table = {
    **{name: SHARED[name] for name in _SHARED},
    "input": Supported(str | list[dict[str, Any]], note="messages, function calls and their outputs"),
    "instructions": Supported(str, note="a system message before the input"),
    "max_output_tokens": Supported(int, "max_tokens"),
    "tools": Supported(list[dict[str, Any]], note="functions"),
    "tool_choice": Supported(Any),
    "parallel_tool_calls": Supported(bool, note="with false, calls after the first are left out"),
    "reasoning": Supported(ReasoningOptions, note="effort, as a variable of the chat template"),
    "text": Supported(TextOptions, note="format: text, json_object or json_schema"),
    "include": Supported(list[str], note="only reasoning.encrypted_content, which has no effect"),
    "store": Accepted("nothing is stored"),
    "stream_options": Accepted("events are not padded"),
    "prompt_cache_options": Accepted("prefixes are cached whenever they can be"),
    "max_tool_calls": Accepted("a limit on tools that the server runs; there are none"),
    "background_options": Accepted("nothing runs in the background"),
    "access_programs": Accepted("there are none"),
    "image": Accepted("there are no images"),
    "previous_response_id": Refused(_NOTHING_STORED),
    "conversation": Refused(_NOTHING_STORED),
    "prompt": Refused(_NOTHING_STORED),
    "background": Refused("nothing is stored; wait for the answer, or stream it", (False,)),
    "truncation": Refused("a prompt is never cut; one that is too long is refused", ("disabled",)),
    "context_management": Refused("a prompt is never shortened here", ([],)),
    "moderation": Refused("this server moderates nothing"),
    "top_logprobs": Refused("/v1/chat/completions has log-probabilities", (0,)),
}
_NAMES = names(FIELDS) | {
    "chat": "input",
    "chat.messages": "input",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.template_args_json": "reasoning.effort",
    "structured_output.json_schema": "text.format.schema",
}
_ENCRYPTED = "reasoning.encrypted_content"
#: Characters of the user, which a response repeats.
_MAX_USER = 512
#: Bytes of all that a response repeats. It is held until the end, and three events of a stream have it.
_MAX_REPEATED = 64 << 10
#: The fields that a response repeats, with what stands for those that are unset.
_UNSET: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
}
#: Those of any size, in the order in which they are left out if all are too much.
_LARGE = ("tools", "instructions", "text", "reasoning", "tool_choice")


class Responses(generation.FrontendEndpoints):
    """The endpoint."""

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("/v1/responses", self.answer, scopes=("generate",), names=_NAMES),)

    async def answer(self, call: HttpCall) -> Response | None:
        wanted = await generation.read_request(
            call, self._frontend, FIELDS, self._max_body_bytes, partial(_wanted, call)
        )
        if wanted.stream:
            events = ResponseEvents(call, wanted)
            call.errors = events
            await generation.stream(self._frontend, (wanted.ask,), events.write)
            return None
        result = await generation.gather_one(self._frontend, wanted.ask, has_one_call=wanted.has_one_call)
        return Response(response_json(call, wanted, result), media_type="application/json")


def _wanted(call: HttpCall, values: Values, facts: ModelFacts, origin: Origin) -> WantedResponse:
    """Return what the call asks for. Raise InvalidRequest, FeatureNotSupported."""
    chat = chat_of(values.supported, facts)
    call.places = chat.places
    call.note_ignored(values.ignored + chat.ignored + _ignored_parts(values.get("include", [])))
    options = groups(FIELDS, values.supported)
    if user := values.get("user"):
        _check_user(user)
        generation.label(origin, user)
        options.setdefault("cache", {}).update(generation.cache_of(user))
    constraint = constraint_of(values.get("text"))
    return WantedResponse(
        generation.ask_of(call, origin, chat.input, options, model=facts.name, constraint=constraint),
        bool(values.get("stream")),
        values.get("parallel_tool_calls") is False,
        _repeated(values),
    )


def _ignored_parts(include: list[str]) -> tuple[str, ...]:
    for i, part in enumerate(include):
        if part != _ENCRYPTED:
            path = f"include[{i}]"
            raise FeatureNotSupported(f"{path}: {part[:100]!r} is not included here", field=path)
    return ("include",) if include else ()


def _check_user(user: str) -> None:
    if len(user) > _MAX_USER:
        message = f"user: has {len(user)} characters, {_MAX_USER} are allowed; send a shorter name or a digest"
        raise InvalidRequest(message, field="user", needed=len(user), limit=_MAX_USER)


def _repeated(values: Values) -> dict[str, Any]:
    """Return the fields that a response repeats, at most `_MAX_REPEATED` bytes of them."""
    repeated = {name: values.get(name, unset) for name, unset in _UNSET.items()}
    if "reasoning" in values.supported:
        repeated["reasoning"] = {"effort": values.get("reasoning").effort, "summary": None}
    if repeated["tool_choice"] == "none":
        repeated["tools"] = []
    sizes = {name: len(msgspec.json.encode(value)) for name, value in repeated.items()}
    for name in _LARGE:
        if sum(sizes.values()) > _MAX_REPEATED:
            repeated[name], sizes[name] = _UNSET[name], 0
    return repeated
