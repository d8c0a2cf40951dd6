"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from photon_grpc.core.ask import ConstraintAsk, Origin
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.gateway.anthropic.answers import MessageEvents, WantedMessage, message_json
from photon_grpc.gateway.anthropic.blocks import Choice, OutputConfig, OutputFormat, Thinking, chat_of
from photon_grpc.gateway.calls import generation
from photon_grpc.gateway.calls.body import json_object
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.chat import BodyChat
from photon_grpc.gateway.calls.errors import ANTHROPIC_ERRORS
from photon_grpc.gateway.calls.fields import Accepted, Refused, Supported, Table, Values, groups, names, read
from photon_grpc.gateway.calls.guard import Endpoint


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    user_id: str | None = None


_NO_EFFECT = Accepted("nothing is billed or stored, and every request is served alike")

#: The fields of a prompt, which are those of count_tokens.
PROMPT: Table = {
    "model": Supported(str),
    "messages": Supported(list[dict[str, Any]]),
    "system": Supported(str | list[dict[str, Any]]),
    "tools": Supported(list[dict[str, Any]], note="custom tools"),
    "tool_choice": Supported(Choice, note="with disable_parallel_tool_use, calls after the first are left out"),
    "thinking": Supported(
        Thinking, note="the variable enable_thinking of the chat template; budget_tokens has no effect"
    ),
    "output_config": Supported(OutputConfig, note="format, and effort as a variable of the chat template"),
    "context_management": Supported(dict[str, Any], note="only edits of thinking, which later turns leave out anyway"),
    "cache_control": Accepted("prefixes are cached whenever they can be"),
    "speed": _NO_EFFECT,
    "user_profile_id": _NO_EFFECT,
    "workspace_id": _NO_EFFECT,
    "mcp_servers": Refused("this server calls no others; define the tools in tools", ([],)),
    "compaction": Refused("a prompt is never shortened here"),
}
FIELDS: Table = {
    **PROMPT,
    "max_tokens": Supported(int, "max_tokens"),
    "stream": Supported(bool),
    "temperature": Supported(float, "temperature"),
    "top_p": Supported(float, "top_p"),
    "top_k": Supported(int, "top_k", lambda top_k: top_k or -1, note="0: all"),
    "stop_sequences": Supported(tuple[str, ...], "stop_strings"),
    "metadata": Supported(_Metadata, note="user_id is a label of the request, and a part of the cache salt"),
    "service_tier": _NO_EFFECT,
    "diagnostics": _NO_EFFECT,
    "billing_policy": _NO_EFFECT,
    "betas": _NO_EFFECT,
    "inference_geo": Refused("this server does not know where it runs"),
    "container": Refused("this server runs no tools"),
    "fallbacks": Refused("this server has one model", ([],)),
    "fallback_credit_token": Refused("this server has one model"),
    "thread": Refused("nothing is stored; send all messages"),
}
_NAMES = names(FIELDS) | {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.template_args_json": "thinking",
    "structured_output.json_schema": "output_config.format.schema",
}
_BETA = "anthropic-beta"


class AnthropicMessages(generation.FrontendEndpoints):
    """The endpoints."""

    def endpoints(self) -> tuple[Endpoint, ...]:
        form: dict[str, Any] = {"errors": ANTHROPIC_ERRORS, "names": _NAMES}
        return (
            Endpoint("/v1/messages", self.answer, scopes=("generate",), **form),
            Endpoint("/v1/messages/count_tokens", self.count, scopes=("models", "generate"), **form),
        )

    async def answer(self, call: HttpCall) -> Response | None:
        wanted = await generation.read_request(
            call, self._frontend, FIELDS, self._max_body_bytes, partial(_wanted, call)
        )
        if wanted.stream:
            await generation.stream(self._frontend, (wanted.ask,), MessageEvents(call, wanted).write)
            return None
        result = await generation.gather_one(self._frontend, wanted.ask, has_one_call=wanted.has_one_call)
        return Response(message_json(call, wanted, result), media_type="application/json")

    async def count(self, call: HttpCall) -> Response:
        values = read(PROMPT, await json_object(call, self._max_body_bytes))
        facts = self._frontend.model(values.get("model", ""))
        chat = _chat(call, values, facts)
        ids = await self._frontend.tokenize(facts.name, chat.input, call.caller)
        return Response(msgspec.json.encode({"input_tokens": len(ids)}), media_type="application/json")


def _wanted(call: HttpCall, values: Values, facts: ModelFacts, origin: Origin) -> WantedMessage:
    """Return what the call asks for. Raise InvalidRequest, FeatureNotSupported."""
    if "max_tokens" not in values.supported:
        raise InvalidRequest("max_tokens: is missing; set the most tokens of the answer", field="max_tokens")
    chat = _chat(call, values, facts)
    _check_last(values)
    options = groups(FIELDS, values.supported)
    # The first event says how many tokens the prompt has.
    options["stream"] = {"continuous_usage": True}
    if (metadata := values.get("metadata")) is not None and metadata.user_id:
        generation.label(origin, metadata.user_id)
        options["cache"] = generation.cache_of(metadata.user_id)
    thinking, choice = values.get("thinking"), values.get("tool_choice")
    constraint = _constraint(values)
    return WantedMessage(
        generation.ask_of(call, origin, chat.input, options, model=facts.name, constraint=constraint),
        bool(values.get("stream")),
        choice is not None and choice.disable_parallel_tool_use,
        thinking is None or thinking.display != "omitted",
    )


def _chat(call: HttpCall, values: Values, facts: ModelFacts) -> BodyChat:
    chat = chat_of(values.supported, facts)
    ignored = values.ignored + chat.ignored + _ignored_edits(values.get("context_management", {}))
    if _BETA in call.headers:
        ignored += (_BETA,)
    call.note_ignored(tuple(dict.fromkeys(ignored)))
    call.places = chat.places
    return chat


def _check_last(values: Values) -> None:
    messages = values.get("messages", [])
    if messages and messages[-1].get("role") == "assistant":
        path = f"messages[{len(messages) - 1}]"
        message = f"{path}: an assistant's message cannot be continued here; end with a message of the user"
        raise FeatureNotSupported(message, field=path)


def _constraint(values: Values) -> ConstraintAsk | None:
    form: OutputFormat | None = config.format if (config := values.get("output_config")) is not None else None
    if form is None:
        return None
    if form.type != "json_schema":
        raise InvalidRequest("output_config.format.type: must be json_schema", field="output_config.format.type")
    return ConstraintAsk("json_schema", msgspec.json.encode(form.schema).decode())


def _ignored_edits(management: dict[str, Any]) -> tuple[str, ...]:
    """Return the name of edits without effect. Raise FeatureNotSupported for those that would shorten the prompt."""
    edits = management.get("edits") or []
    for i, edit in enumerate(edits if isinstance(edits, list) else [edits]):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not (isinstance(kind, str) and kind.startswith("clear_thinking")):
            path = f"context_management.edits[{i}]"
            raise FeatureNotSupported(f"{path}: a prompt is never shortened here", field=path)
    return ("context_management",) if edits else ()
