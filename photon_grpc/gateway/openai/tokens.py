"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from photon_grpc.core.ask import ChatInput, TextInput
from photon_grpc.errors import FeatureNotSupported, InvalidRequest
from photon_grpc.gateway.calls.body import json_object
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.fields import Refused, Supported, Table, Values, read
from photon_grpc.gateway.calls.generation import FrontendEndpoints
from photon_grpc.gateway.calls.guard import Endpoint
from photon_grpc.gateway.openai.answers import token_text
from photon_grpc.gateway.openai.messages import chat_of

TOKENIZE: Table = {
    "model": Supported(str),
    "prompt": Supported(str),
    "add_special_tokens": Supported(bool, note="true if unset"),
    "parse_special_tokens": Supported(bool, note="true if unset"),
    "messages": Supported(list[dict[str, Any]], note="a chat in place of the prompt"),
    "add_generation_prompt": Supported(bool),
    "tools": Supported(list[dict[str, Any]]),
    "chat_template_kwargs": Supported(dict[str, Any]),
    "return_token_strs": Supported(bool, note="each token as text, in token_strs"),
    "continue_final_message": Refused("a message cannot be continued here", (False,)),
    "chat_template": Refused("the model's own template is used"),
    "mm_processor_kwargs": Refused("this server reads text", ({},)),
    "media_io_kwargs": Refused("this server reads text", ({},)),
}
DETOKENIZE: Table = {
    "model": Supported(str),
    "tokens": Supported(tuple[int, ...]),
    "skip_special_tokens": Supported(bool, note="false if unset"),
}
_SCOPES = ("models", "generate")
_DETOKENIZE_NAMES = {"token_ids": "tokens", "token_ids.ids": "tokens"}
_TOKENIZE_NAMES = {"text": "prompt", "chat.messages": "messages", "chat.tools": "tools"}


class Tokens(FrontendEndpoints):
    """The endpoints."""

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint("/tokenize", self.tokenize, scopes=_SCOPES, names=_TOKENIZE_NAMES),
            Endpoint("/detokenize", self.detokenize, scopes=_SCOPES, names=_DETOKENIZE_NAMES),
        )

    async def tokenize(self, call: HttpCall) -> Response:
        values = read(TOKENIZE, await json_object(call, self._max_body_bytes))
        facts = self._frontend.model(values.get("model", ""))
        ids = await self._frontend.tokenize(facts.name, _input(values), call.caller)
        answer = {"count": len(ids), "max_model_len": facts.max_context_tokens, "tokens": ids}
        if values.get("return_token_strs"):
            answer["token_strs"] = await asyncio.to_thread(_texts, self._frontend.token_bytes(facts.name), ids)
        return _json(answer)

    async def detokenize(self, call: HttpCall) -> Response:
        values = read(DETOKENIZE, await json_object(call, self._max_body_bytes))
        if "tokens" not in values.supported:
            raise InvalidRequest("tokens: is missing; send token ids", field="tokens")
        ids, skips = values.get("tokens"), values.get("skip_special_tokens", False)
        text = await self._frontend.detokenize(values.get("model", ""), ids, skips, call.caller)
        return _json({"prompt": text})


def _input(values: Values) -> TextInput | ChatInput:
    if ("prompt" in values.supported) == ("messages" in values.supported):
        raise InvalidRequest("prompt: set either prompt or messages", field="prompt")
    if "messages" in values.supported:
        _check_template_writes_specials(values)
        return chat_of(values.supported)
    return TextInput(
        values.get("prompt"),
        parse_special_tokens=values.get("parse_special_tokens", True),
        add_special_tokens=values.get("add_special_tokens", True),
    )


def _check_template_writes_specials(values: Values) -> None:
    for name in ("add_special_tokens", "parse_special_tokens"):
        if values.get(name):
            message = f"{name}: is for a prompt; the chat template writes the special tokens of messages"
            raise FeatureNotSupported(message, field=name)


def _texts(token_bytes: Callable[[int], bytes], ids: Sequence[int]) -> list[str]:
    return [token_text(token_bytes(id)) for id in ids]


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
