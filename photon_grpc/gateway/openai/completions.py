"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from photon_grpc.core.ask import Ask, IdsInput, Origin, TextInput
from photon_grpc.core.generation import Start, TokenScore, Usage
from photon_grpc.errors import InvalidRequest, KVCapacity
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.output.logprobs import TokenLogprobs
from photon_grpc.frontend.output.update import OutputDelta, Result, Update
from photon_grpc.gateway.calls import generation
from photon_grpc.gateway.calls.call import HttpCall
from photon_grpc.gateway.calls.fields import Refused, Supported, Table, Values, groups, names
from photon_grpc.gateway.calls.guard import Endpoint
from photon_grpc.gateway.openai.answers import TextOffsets, completion_logprobs, head_of, off_the_loop, usage_of
from photon_grpc.gateway.openai.options import (
    SHARED,
    EventOptions,
    finish_reason,
    form_of,
    stop_reason,
    stream_options,
)

#: Prompts of one call.
MAX_PROMPTS = 256
#: OpenAI's default of this endpoint.
_MAX_TOKENS = 16

FIELDS: Table = {
    **SHARED,
    "prompt": Supported(Any, note="a text, ids, or a list of either"),
    "max_tokens": Supported(int, "max_tokens", note="16 if unset; 0 only with echo"),
    "logprobs": Supported(int, "logprobs"),
    "echo": Supported(bool, note="the prompt comes first; with logprobs it has them, too"),
    "add_special_tokens": Supported(bool, note="whether BOS and the like are added to a text; true if unset"),
    "parse_special_tokens": Supported(
        bool, note="whether special tokens spelled out in a text are those; true if unset"
    ),
    "suffix": Refused("filling in the middle is not supported; write the text after the gap into the prompt", ("",)),
    "prompt_embeds": Refused("a prompt is text or ids"),
}
_NAMES = names(FIELDS) | {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "output.prompt_logprobs": "logprobs",
}


@dataclass(frozen=True, slots=True)
class _WantedTexts:
    """A call, read and checked."""

    asks: tuple[Ask, ...]
    #: The place of each prompt in the body.
    places: tuple[str, ...]
    #: The prompts as text; empty texts unless they come first.
    echoes: tuple[str, ...]
    #: Whether the only output token is left out: with echo, max_tokens may be 0.
    is_prompt_only: bool
    num_outputs: int
    stream: bool
    options: EventOptions


class Completions(generation.FrontendEndpoints):
    """The endpoint."""

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("/v1/completions", self.answer, scopes=("generate",), names=_NAMES),)

    async def answer(self, call: HttpCall) -> Response | None:
        wanted = await generation.read_request(
            call, self._frontend, FIELDS, self._max_body_bytes, partial(self._wanted, call)
        )
        with generation.recording_refusals(self._frontend, wanted.asks[0].origin):
            wanted = await self._with_echoes(call, wanted)
        if not wanted.stream:
            results = await generation.gather(self._frontend, wanted.asks, partial(_naming, call, wanted))
            num_scored = sum(each.num_ids for result in results for each in _scores_of(result))
            body = await off_the_loop(partial(_body, call, wanted, results), num_scored)
            return Response(body, media_type="application/json")
        chunks = _TextChunks(call, wanted)
        await generation.stream(self._frontend, wanted.asks, chunks.write, partial(_naming, call, wanted))
        await chunks.end()
        return None

    def _wanted(self, call: HttpCall, values: Values, facts: ModelFacts, first: Origin) -> _WantedTexts:
        if user := values.get("user"):
            generation.label(first, user)
        prompts, options = _prompts(values), _options(values)
        constraint = form_of(values.supported, call)
        asks = []
        for i, prompt in enumerate(prompts):
            origin = call.origin(f"-{i}") if len(prompts) > 1 else first
            origin.model, origin.labels = facts.name, first.labels
            asks.append(generation.ask_of(call, origin, prompt, options, model=facts.name, constraint=constraint))
        return _WantedTexts(
            tuple(asks),
            _places(values.get("prompt"), len(asks)),
            ("",) * len(asks) if values.get("echo") else (),
            _is_prompt_only(values),
            values.get("n", 1),
            bool(values.get("stream")),
            stream_options(values),
        )

    async def _with_echoes(self, call: HttpCall, wanted: _WantedTexts) -> _WantedTexts:
        if wanted.echoes:
            return replace(wanted, echoes=tuple([await self._text(call, wanted, i) for i in range(len(wanted.asks))]))
        return replace(wanted, echoes=("",) * len(wanted.asks))

    async def _text(self, call: HttpCall, wanted: _WantedTexts, number: int) -> str:
        ask = wanted.asks[number]
        if isinstance(ask.input, IdsInput):
            with _naming(call, wanted, number):
                return await self._frontend.detokenize(ask.model, ask.input.token_ids, False, call.caller)
        return ask.input.text if isinstance(ask.input, TextInput) else ""


@contextmanager
def _naming(call: HttpCall, wanted: _WantedTexts, number: int) -> Iterator[None]:
    """Have the call's first refusal name the place of the prompt that it is about."""
    try:
        yield
    except (InvalidRequest, KVCapacity):
        call.places = call.places or dict.fromkeys(("text", "token_ids", "token_ids.ids"), wanted.places[number])
        raise


def _places(prompt: Any, count: int) -> tuple[str, ...]:
    """Return the places of the prompts in a body."""
    is_one = isinstance(prompt, str) or _is_ids(prompt)
    return ("prompt",) if is_one else tuple([f"prompt[{i}]" for i in range(count)])


def _is_prompt_only(values: Values) -> bool:
    return bool(values.get("echo")) and values.get("max_tokens") == 0


def _options(values: Values) -> dict[str, dict[str, Any]]:
    """Return the options of each ask by group. Raise InvalidRequest."""
    options = groups(FIELDS, values.supported)
    stop = options.setdefault("stop", {})
    stop["max_tokens"] = 1 if _is_prompt_only(values) else stop.get("max_tokens", _MAX_TOKENS)
    if values.get("logprobs") is None and values.get("logprob_token_ids"):
        raise InvalidRequest("logprob_token_ids: needs logprobs", field="logprob_token_ids")
    if values.get("echo") and "logprobs" in values.supported:
        options["output"]["prompt_logprobs"] = values.get("logprobs")
    options.setdefault("cache", {}).update(generation.cache_of(values.get("user", ""), values.get("cache_salt", "")))
    if stream_options(values).continuous_usage_stats:
        options["stream"] = {"continuous_usage": True}
    return options


def _prompts(values: Values) -> list[TextInput | IdsInput]:
    """Return the prompts of a body. Raise InvalidRequest."""
    prompt = values.get("prompt")
    wrong = InvalidRequest("prompt: must be a text, a list of ids, or a list of either, and not empty", field="prompt")
    if prompt is None or prompt == []:
        raise wrong
    many = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(many, list):
        raise wrong
    if len(many) > MAX_PROMPTS:
        message = f"prompt: has {len(many)} prompts; {MAX_PROMPTS} are allowed"
        raise InvalidRequest(message, field="prompt", needed=len(many), limit=MAX_PROMPTS)
    found: list[TextInput | IdsInput] = []
    for each in many:
        if isinstance(each, str):
            parsed, added = values.get("parse_special_tokens", True), values.get("add_special_tokens", True)
            found.append(TextInput(each, parse_special_tokens=parsed, add_special_tokens=added))
        elif _is_ids(each):
            found.append(IdsInput(tuple(each)))
        else:
            raise wrong
    return found


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and set(map(type, prompt)) == {int}


# --- the whole answer ------------------------------------------------------------------------------------------------


def _scores_of(result: Result) -> list[TokenLogprobs]:
    return [result.prompt_scores, *[output.scores for output in result.outputs]]


def _body(call: HttpCall, wanted: _WantedTexts, results: Sequence[Result]) -> bytes:
    choices = [_choice(wanted, i, result, output) for i, result in enumerate(results) for output in result.outputs]
    head = head_of(f"cmpl-{call.request_id}", "text_completion", results[0].start)
    usage = _usage_of(wanted, [result.usage for result in results])
    return msgspec.json.encode(head | {"choices": choices, "usage": usage})


def _usage_of(wanted: _WantedTexts, usages: Iterable[Usage]) -> dict[str, Any]:
    if wanted.is_prompt_only:
        usages = [replace(usage, output_tokens=0) for usage in usages]
    return usage_of(usages)


def _choice(wanted: _WantedTexts, number: int, result: Result, output: OutputDelta) -> dict[str, Any]:
    text, logprobs = wanted.echoes[number], None
    if wanted.asks[number].output.logprobs is not None:
        scores = [*result.prompt_scores, *(() if wanted.is_prompt_only else output.scores)]
        logprobs = completion_logprobs(scores, TextOffsets.ending_at(len(text), result.prompt_scores))
    if not wanted.is_prompt_only:
        text += output.text
    return {"index": number * wanted.num_outputs + output.index, "text": text, "logprobs": logprobs} | _end_of(output)


def _end_of(output: OutputDelta) -> dict[str, Any]:
    finish = output.finish
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": finish_reason(finish), "stop_reason": stop_reason(finish)}


# --- chunks of a stream ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TextChoice:
    """The state of one choice of a stream."""

    #: Everything of a plain chunk before its text.
    before: bytes
    offsets: TextOffsets
    has_begun: bool = False


@dataclass(slots=True)
class _TextChunks:
    """The writer of a stream's chunks."""

    call: HttpCall
    wanted: _WantedTexts
    _head: dict[str, Any] = field(default_factory=dict)
    _choices: dict[int, _TextChoice] = field(default_factory=dict)
    _usages: dict[int, Usage] = field(default_factory=dict)
    #: Scores of the prompts, which come with the first update of each.
    _prompts: dict[int, Sequence[TokenScore]] = field(default_factory=dict)

    async def write(self, number: int, start: Start, update: Update) -> None:
        if not self._head:
            self._head = head_of(f"cmpl-{self.call.request_id}", "text_completion", start)
            if self.wanted.options.include_usage:
                self._head["usage"] = None
        if number not in self._prompts:
            self._prompts[number] = tuple(update.prompt_scores)
        if update.usage is not None:
            self._usages[number] = update.usage
        num_scored = update.prompt_scores.num_ids + sum(delta.scores.num_ids for delta in update.deltas)
        events = await off_the_loop(lambda: self._events(number, update), num_scored)
        if events:
            await self.call.events.write(events)

    async def end(self) -> None:
        last = b"data: [DONE]\n\n"
        if self.wanted.options.include_usage:
            whole = self._head | {"choices": [], "usage": _usage_of(self.wanted, self._usages.values())}
            last = b"data: " + msgspec.json.encode(whole) + b"\n\n" + last
        await self.call.events.write(last)

    def _events(self, number: int, update: Update) -> bytes:
        return b"".join([self._event(number, update, delta) for delta in update.deltas])

    def _event(self, number: int, update: Update, delta: OutputDelta) -> bytes:
        index = number * self.wanted.num_outputs + delta.index
        choice = self._choices.get(index) or self._choices.setdefault(index, self._begin(number, index))
        is_plain = choice.has_begun and delta.finish is None and self.wanted.asks[number].output.logprobs is None
        if is_plain and not self.wanted.options.continuous_usage_stats:
            if not delta.text:
                return b""
            return choice.before + msgspec.json.encode(delta.text) + _AFTER
        return self._full(number, update, delta, choice, index)

    def _begin(self, number: int, index: int) -> _TextChoice:
        head = msgspec.json.encode(self._head)[:-1]
        offsets = TextOffsets.ending_at(len(self.wanted.echoes[number]), self._prompts[number])
        return _TextChoice(b"data: " + head + b',"choices":[{"index":%d,"text":' % index, offsets)

    def _full(self, number: int, update: Update, delta: OutputDelta, choice: _TextChoice, index: int) -> bytes:
        text, scores = "" if self.wanted.is_prompt_only else delta.text, []
        if self.wanted.asks[number].output.logprobs is not None:
            scores = [] if choice.has_begun else [*self._prompts[number]]
            scores += [] if self.wanted.is_prompt_only else [*delta.scores]
        if not choice.has_begun:
            choice.has_begun = True
            text = self.wanted.echoes[number] + text
        logprobs = completion_logprobs(scores, choice.offsets) if scores else None
        chunk: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs} | _end_of(delta)
        whole = self._head | {"choices": [chunk]}
        if self.wanted.options.continuous_usage_stats:
            whole["usage"] = _usage_of(self.wanted, self._usages.values())
        return b"data: " + msgspec.json.encode(whole) + b"\n\n"


_AFTER = b',"logprobs":null,"finish_reason":null}]}\n\n'
