"""Fields that several of OpenAI's endpoints share, and vLLM's extensions of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.output.update import OutputFinish
from photon_grpc.gateway.calls.fields import Accepted, Obeyed, Refused, Table, converted

_NO_EFFECT = Accepted("nothing is stored, and every request is served alike")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    #: vLLM's: usage in every chunk.
    continuous_usage_stats: bool = False
    #: Padding against traffic analysis; there is none.
    include_obfuscation: bool = False


def _sorted_bias(bias: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(bias.items()))


#: The fields of a generation; each API adds its input and its output.
SHARED: Table = {
    "model": Obeyed(str),
    "stream": Obeyed(bool),
    "stream_options": Obeyed(StreamOptions),
    "user": Obeyed(str, note="a label of the request, and a part of the cache salt"),
    # Sampling.
    "temperature": Obeyed(float, "temperature"),
    "top_p": Obeyed(float, "top_p"),
    "n": Obeyed(int, "num_outputs"),
    "seed": Obeyed(int, "seed"),
    "presence_penalty": Obeyed(float, "presence_penalty"),
    "frequency_penalty": Obeyed(float, "frequency_penalty"),
    "logit_bias": Obeyed(dict[int, float], "logit_bias", _sorted_bias),
    "stop": Obeyed(str | tuple[str, ...], "stop_strings", lambda stop: (stop,) if isinstance(stop, str) else stop),
    # vLLM's extensions.
    "top_k": Obeyed(int, "top_k", lambda top_k: -1 if top_k == 0 else top_k, note="0 and -1: all"),
    "min_p": Obeyed(float, "min_p"),
    "repetition_penalty": Obeyed(float, "repetition_penalty"),
    "min_tokens": Obeyed(int, "min_tokens"),
    "ignore_eos": Obeyed(bool, "ignore_eos"),
    "stop_token_ids": Obeyed(tuple[int, ...], "stop_token_ids"),
    "include_stop_str_in_output": Obeyed(bool, "include_stop_in_text"),
    "skip_special_tokens": Obeyed(bool, "skip_special_tokens"),
    "allowed_token_ids": Obeyed(tuple[int, ...], "allowed_token_ids"),
    "priority": Obeyed(int, "priority", lambda priority: -priority, note="as in vLLM, lower runs first"),
    "cache_salt": Obeyed(str, note="shares cached prefixes only with requests of the same salt"),
    "guided_json": Obeyed(dict[str, Any] | str, note="a JSON Schema"),
    "guided_regex": Obeyed(str),
    "guided_choice": Obeyed(tuple[str, ...]),
    "guided_grammar": Obeyed(str),
    "structured_outputs": Obeyed(dict[str, Any], note="one of json, json_object, regex, choice, grammar"),
    "response_format": Obeyed(dict[str, Any], note="text, json_object or json_schema"),
    "spaces_between_special_tokens": Refused("spaces are as the tokenizer has them", (True,)),
    "use_beam_search": Refused("there is no beam search; sample several outputs with n", (False,)),
    "length_penalty": Refused("there is no beam search", (1.0, 1)),
    "bad_words": Refused("ban tokens with logit_bias", ([],)),
    "truncate_prompt_tokens": Refused("a prompt is never cut; one that is too long is refused"),
    # OpenAI's fields without effect.
    "store": _NO_EFFECT,
    "metadata": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "prompt_cache_retention": _NO_EFFECT,
    "prompt_cache_key": Obeyed(str, "session_id", note="keeps the prompt cached for longer"),
}

_CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_KINDS: dict[str, Any] = {
    "json": dict[str, Any] | str,
    "json_object": bool,
    "regex": str,
    "choice": tuple[str, ...],
    "grammar": str,
}


class _JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    json_schema: _JsonSchema | None = None


def constraint_of(values: Mapping[str, Any]) -> ConstraintAsk | None:
    """Return the form of the output that a body asks for. Raise InvalidRequest, also for two of them."""
    found: dict[str, ConstraintAsk] = {}
    if (wanted := values.get("response_format")) is not None:
        constraint = _response_format(wanted)
        if constraint is not None:
            found["response_format"] = constraint
    for name, kind in _CONSTRAINTS.items():
        if name in values:
            found[name] = _constraint(kind, values[name])
    for kind, value in values.get("structured_outputs", {}).items():
        if kind not in _KINDS:
            path = f"structured_outputs.{kind[:100]}"
            raise InvalidRequest(f"{path}: there is no such form; there are {', '.join(_KINDS)}", field=path)
        if value is not None:
            found[f"structured_outputs.{kind}"] = _constraint(kind, value)
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(f"{second}: {first} is set, too; an output has one form", field=second)
    return next(iter(found.values()), None)


def _constraint(kind: str, value: Any) -> ConstraintAsk:
    value = converted(value, _KINDS[kind], f"structured_outputs.{kind}")
    match kind:
        case "json":
            return ConstraintAsk(
                "json_schema", value if isinstance(value, str) else msgspec.json.encode(value).decode()
            )
        case "json_object":
            return ConstraintAsk("json_object")
        case "choice":
            return ConstraintAsk("choices", choices=value)
        case "regex":
            return ConstraintAsk("regex", value)
        case _:
            return ConstraintAsk("grammar", value)


def _response_format(wanted: dict[str, Any]) -> ConstraintAsk | None:
    form = converted(wanted, _ResponseFormat, "response_format")
    match form.type:
        case "text":
            return None
        case "json_object":
            return ConstraintAsk("json_object")
        case "json_schema":
            if form.json_schema is None or form.json_schema.schema is None:
                path = "response_format.json_schema.schema"
                raise InvalidRequest(f"{path}: is missing", field=path)
            return ConstraintAsk("json_schema", msgspec.json.encode(form.json_schema.schema).decode())
    message = "response_format.type: must be text, json_object or json_schema"
    raise InvalidRequest(message, field="response_format.type")


_LENGTH = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.TIME_LIMIT)


def finish_reason(finish: OutputFinish) -> str:
    if finish.reason in _LENGTH:
        return "length"
    return "abort" if finish.reason is FinishReason.ABORTED else "stop"


def stop_reason(finish: OutputFinish) -> str | int | None:
    """Return the stop string or stop token that ended an output, as vLLM reports it."""
    return finish.stop_token_id if finish.stop_string is None else finish.stop_string
