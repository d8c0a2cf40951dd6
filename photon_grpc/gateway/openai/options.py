"""Fields that several of OpenAI's endpoints share, and vLLM's extensions of them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.constraints.constraint import field_of
from photon_grpc.frontend.output.update import OutputFinish
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.fields import Accepted, Refused, Supported, Table, Values, converted

_NO_EFFECT = Accepted("nothing is stored, and every request is served alike")
_NO_MEDIA = Refused("this server reads text", ({},))
_NO_IDS = Refused("ask /tokenize, or gRPC, which reports ids", (False,))
_NOT_DISTRIBUTED = Refused("prompts are computed where they are answered", ({},))
#: vLLM's seed that stands for none.
_NO_SEED = -1
#: Words for the most drafts of a step.
_DRAFTS = {"off": 0, "auto": None}


class EventOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field stream_options."""

    include_usage: bool = False
    #: vLLM's: usage in every chunk.
    continuous_usage_stats: bool = False
    #: Padding against traffic analysis; there is none.
    include_obfuscation: bool = False


def stream_options(values: Values) -> EventOptions:
    """Return the options of a stream. Raise InvalidRequest if there is none."""
    options = values.get("stream_options")
    if options is not None and not values.get("stream"):
        raise InvalidRequest("stream_options: needs stream: true", field="stream_options")
    return options or EventOptions()


def _sorted_bias(bias: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(bias.items()))


def _seed(seed: int) -> int | None:
    """Return a seed as the engine takes it. OpenAI's are signed."""
    return None if seed == _NO_SEED else seed % 2**64 if -(2**63) <= seed < 0 else seed


def _priority(priority: int) -> int:
    """Return a priority as the engine takes it, which runs higher ones first. Raise InvalidRequest."""
    if not -(2**31) < priority <= 2**31:
        least, most = 1 - 2**31, 2**31
        message = f"priority: must lie between {least} and {most}, is {priority}"
        raise InvalidRequest(message, field="priority", needed=priority, limit=most if priority > most else least)
    return -priority


def _speculation(most: Any) -> int | None:
    """Return the most drafts of a step; None: as many as pay. Raise InvalidRequest for another value."""
    if type(most) is int:
        return most
    if type(most) is not str or most not in _DRAFTS:
        message = f"speculation: must be a whole number from 0 to 7, off or auto, is {reprlib.repr(most)}"
        raise InvalidRequest(message, field="speculation")
    return _DRAFTS[most]


#: The fields of a generation; each API adds its input and its output.
SHARED: Table = {
    "model": Supported(str),
    "stream": Supported(bool),
    "stream_options": Supported(EventOptions, note="only with stream; include_usage, vLLM's continuous_usage_stats"),
    "user": Supported(str, note="a label of the request, and a part of the cache salt"),
    # Sampling.
    "temperature": Supported(float, "temperature"),
    "top_p": Supported(float, "top_p"),
    "n": Supported(int, "num_outputs"),
    "seed": Supported(int, "seed", _seed, note="-1, as in vLLM: none"),
    "presence_penalty": Supported(float, "presence_penalty"),
    "frequency_penalty": Supported(float, "frequency_penalty"),
    "logit_bias": Supported(dict[int, float], "logit_bias", _sorted_bias),
    "stop": Supported(str | tuple[str, ...], "stop_strings", lambda stop: (stop,) if isinstance(stop, str) else stop),
    # vLLM's extensions.
    "top_k": Supported(int, "top_k", lambda top_k: -1 if top_k == 0 else top_k, note="0 and -1: all"),
    "min_p": Supported(float, "min_p"),
    "repetition_penalty": Supported(float, "repetition_penalty"),
    "min_tokens": Supported(int, "min_tokens"),
    "ignore_eos": Supported(bool, "ignore_eos"),
    "stop_token_ids": Supported(tuple[int, ...], "stop_token_ids"),
    "include_stop_str_in_output": Supported(bool, "include_stop_in_text"),
    "skip_special_tokens": Supported(bool, "skip_special_tokens"),
    "allowed_token_ids": Supported(tuple[int, ...], "allowed_token_ids"),
    "priority": Supported(int, "priority", _priority, note="as in vLLM, lower runs first"),
    "cache_salt": Supported(str, note="shares cached prefixes only with requests of the same salt"),
    "guided_json": Supported(dict[str, Any] | str, note="a JSON Schema"),
    "guided_regex": Supported(str),
    "guided_choice": Supported(tuple[str, ...]),
    "guided_grammar": Supported(str),
    "structured_outputs": Supported(dict[str, Any], note="one of json, json_object, regex, choice, grammar"),
    "response_format": Supported(dict[str, Any], note="text, json_object or json_schema"),
    "spaces_between_special_tokens": Refused("spaces are as the tokenizer has them", (True,)),
    "use_beam_search": Refused("there is no beam search; sample several outputs with n", (False,)),
    "length_penalty": Refused("there is no beam search", (1.0, 1)),
    "bad_words": Refused("ban tokens with logit_bias", ([],)),
    "truncate_prompt_tokens": Refused("a prompt is never cut; one that is too long is refused"),
    "truncation_side": Refused("a prompt is never cut; one that is too long is refused"),
    "best_of": Refused("sample several outputs with n, and rank them by their logprobs", (1,)),
    "logprob_token_ids": Supported(tuple[int, ...], "score_token_ids", note="besides the most likely; needs logprobs"),
    "return_tokens_as_token_ids": Refused("tokens are reported as text", (False,)),
    "return_token_ids": _NO_IDS,
    "return_prompt_text": Refused("ask /tokenize and /detokenize", (False,)),
    "return_token_offsets": Refused("text_offset in logprobs has them", (False,)),
    "return_mm_kwargs": Accepted("there are no media"),
    "prompt_logprobs": Refused("set echo and logprobs in /v1/completions"),
    "logits_processors": Refused("the server runs no code of its callers", ([],)),
    "guided_decoding_backend": Accepted("there is one backend"),
    "guided_whitespace_pattern": Refused("write the white space into a regular expression or grammar"),
    "structural_tag": Refused("write the form as a grammar"),
    "repetition_detection": Refused("raise repetition_penalty or frequency_penalty"),
    "watermarking": Refused("there are no watermarks", (False,)),
    "stream_interval": Accepted("a chunk has all that is new when the reader is ready"),
    "request_id": Refused("send it as the header x-request-id"),
    "session_id": Supported(str, "session_id", note="keeps the prompt cached for longer"),
    "speculation": Supported(
        Any,
        "speculation",
        _speculation,
        note="this server's: the most drafts of a step, 0 to 7; off: 0; auto, as unset: as many as pay",
    ),
    "mm_processor_kwargs": _NO_MEDIA,
    "media_io_kwargs": _NO_MEDIA,
    "routed_experts_prompt_start": Refused("routed experts are not reported", (0,)),
    "kv_transfer_params": _NOT_DISTRIBUTED,
    "ec_transfer_params": _NOT_DISTRIBUTED,
    "vllm_xargs": Refused("there are no extensions to pass them to", ({},)),
    # OpenAI's fields without effect.
    "store": _NO_EFFECT,
    "metadata": _NO_EFFECT,
    "service_tier": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "prompt_cache_retention": _NO_EFFECT,
    "prompt_cache_options": Accepted("prompts stay cached while there is room"),
    "moderation": Refused("this server moderates nothing"),
    "prompt_cache_key": Supported(str, "session_id", note="keeps the prompt cached for longer"),
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


def form_of(values: Mapping[str, Any], call: HttpCall) -> ConstraintAsk | None:
    """Return the form of the output that a body asks for; note its place. Raise InvalidRequest, also for two forms."""
    found = dict(_forms(values))
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(f"{second}: {first} is set, too; an output has one form", field=second)
    for name, constraint in found.items():
        field = field_of(constraint)
        call.places = {**call.places, field: name, f"{field}.values": name}
        return constraint
    return None


def _forms(values: Mapping[str, Any]) -> Iterator[tuple[str, ConstraintAsk]]:
    if (wanted := values.get("response_format")) is not None and (form := _response_format(wanted)) is not None:
        yield "response_format", form
    for name, kind in _CONSTRAINTS.items():
        if name in values:
            yield name, _constraint(kind, values[name], name)
    for kind, value in values.get("structured_outputs", {}).items():
        path = f"structured_outputs.{kind[:100]}"
        if kind not in _KINDS:
            raise InvalidRequest(f"{path}: must be one of {', '.join(_KINDS)}", field=path)
        if value is not None and value is not False:
            yield path, _constraint(kind, value, path)


def _constraint(kind: str, value: Any, path: str) -> ConstraintAsk:
    value = converted(value, _KINDS[kind], path)
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
    schema = None if form.json_schema is None else form.json_schema.schema
    return response_format_of(form.type, schema, "response_format", "json_schema.schema")


def response_format_of(
    kind: str, schema: dict[str, Any] | None, where: str, schema_name: str = "schema"
) -> ConstraintAsk | None:
    """Return the form of the output, None for text. Raise InvalidRequest."""
    match kind:
        case "text":
            return None
        case "json_object":
            return ConstraintAsk("json_object")
        case "json_schema":
            if schema is None:
                raise InvalidRequest(f"{where}.{schema_name}: is missing", field=f"{where}.{schema_name}")
            return ConstraintAsk("json_schema", msgspec.json.encode(schema).decode())
    raise InvalidRequest(f"{where}.type: must be text, json_object or json_schema", field=f"{where}.type")


_LENGTH = (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.TIME_LIMIT)


def finish_reason(finish: OutputFinish) -> str:
    if finish.reason in _LENGTH:
        return "length"
    return "abort" if finish.reason is FinishReason.ABORTED else "stop"


def stop_reason(finish: OutputFinish) -> str | int | None:
    """Return the stop string or stop token that ended an output, as vLLM reports it."""
    return finish.stop_token_id if finish.stop_string is None else finish.stop_string
