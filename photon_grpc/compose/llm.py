"""`LLM`: the front end and engine of the service in the caller's program, without gRPC."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec import ValidationError, convert, structs

from photon_grpc.client.field_values import plain
from photon_grpc.client.options import check_options, write_options, write_prompt
from photon_grpc.compose.console import bar_of
from photon_grpc.compose.message_type import given_object, message_of, object_of, typed_ask
from photon_grpc.compose.program import Program
from photon_grpc.config.download import fetch_model
from photon_grpc.config.resolve import resolve_program
from photon_grpc.config.settings import in_keywords
from photon_grpc.core.ask import Ask, IdsInput, Origin
from photon_grpc.core.fields import FIELDS, fields_of
from photon_grpc.core.generation import OutputUsage, Prompt, TokenScore, ToolCall
from photon_grpc.core.object_type import ObjectType, object_type_of
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest, StartupError
from photon_grpc.frontend.model import ModelFacts
from photon_grpc.frontend.output.update import OutputDelta, Result
from photon_grpc.server.wire import codec
from photon_grpc.v1 import inference_pb2 as pb

#: Options of a request that have a meaning without a service.
_OPTIONS = frozenset(field.name for field in FIELDS.values() if field.is_for_llm)
#: Options of the reading of a prompt.
_OF_PROMPT = frozenset({"parse_special_tokens", *(field.name for field in fields_of("chat"))})


@dataclass(frozen=True, slots=True)
class Completion:
    """One output of one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    #: Index into the prompts, and into that prompt's num_outputs.
    prompt_index: int
    output_index: int
    prompt_tokens: int
    cached_prompt_tokens: int
    #: Time from arrival to the first token, and to the last one.
    first_token_s: float
    total_s: float
    #: With `logprobs` or `score_token_ids`: one for each id.
    scores: tuple[TokenScore, ...] = ()
    #: With `prompt_logprobs`: one for each id of the prompt.
    prompt_scores: tuple[TokenScore, ...] = ()
    #: With `chat`: the parts of the text, if the chat template has marks for reasoning or calls.
    reasoning: str = ""
    content: str = ""
    #: With `tools`.
    tool_calls: tuple[ToolCall, ...] = ()
    #: Tokens that were drafted for it, and those that became output.
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    #: With `message_type`: a message of that class, if the output is complete.
    message: Any = None
    _parsed: Any = field(default=None, repr=False)

    @property
    def parsed(self) -> Any:
        """With a class as `json_schema` an object of it, otherwise None.

        Raise MessageMismatch if the output was cut off or the class rejects it.
        """
        return None if self._parsed is None else given_object(self._parsed)


class LLM:
    """A model in this program.

    >>> with LLM() as llm:
    ...     print(llm.generate("def fib(n):", max_tokens=32, temperature=0)[0].text)

    `model` is a directory or an id to download (unset: the embedded model). Every flag of `serve`, except those under
    "Server", is a keyword: `LLM(model, max_num_seqs=8, dtype="bfloat16")`. Raises StartupError if a flag or the
    directory is wrong.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **flags: Any) -> None:
        with _in_keywords():
            config = resolve_program({"model": None if model == "" else model, **flags}, os.environ).config
            self._program = Program(fetch_model(config))
        # Also runs at the end of the interpreter.
        weakref.finalize(self, self._program.close)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        chat: bool = False,
        show_progress: bool | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete all prompts; return `num_outputs` completions for each, in the order of the prompts.

        `prompts` is one text, or a sequence of texts, of sequences of ids, or with `chat` of texts (the user's message)
        or conversations. `options` are those of `photon_grpc.client.Options` that have a meaning without a service.
        `show_progress` shows a bar; by default on a terminal, if there are several prompts. Raise PhotonError for the
        first prompt that is refused (the others are aborted), InvalidRequest for a value of a wrong type, TypeError
        for an unknown option.
        """
        _check_switch("show_progress", show_progress)
        asks = self._asks(_listed(prompts), chat, options)
        message_type, object_type = options.get("message_type"), object_type_of(options)
        with bar_of("prompts", len(asks), _has_use(asks) if show_progress is None else show_progress) as advance:
            results = self._program.wait(self._program.generate(asks, advance))
        return [
            each
            for index, result in enumerate(results)
            for each in _completions(index, result, message_type, object_type)
        ]

    def stream(self, prompt: Prompt, *, chat: bool = False, **options: Any) -> Iterator[OutputDelta]:
        """Yield deltas as they are generated: `for delta in llm.stream("def "): print(delta.text, end="")`.

        Leaving the loop aborts the request. The options are those of `generate`. Raise PhotonError.
        """
        (ask,) = self._asks([("prompt", prompt)], chat, options)
        return self._deltas(ask)

    def close(self) -> None:
        """End the engine and release its memory; running and later calls and streams raise Closed.

        It may be called from any thread, in a loop over `stream`, in a signal handler, and more than once.
        """
        self._program.close()

    def _asks(self, prompts: Sequence[tuple[str, Any]], chat: bool, options: Mapping[str, Any]) -> list[Ask]:
        """Convert each prompt, given with its name for errors, as the server would.

        Raise InvalidRequest; TypeError for an unknown option.
        """
        _check_switch("chat", chat)
        check_options(options, _OPTIONS)
        given = {"token_ids": True, **options}
        if isinstance(stops := given.get("stop_strings"), str):
            given["stop_strings"] = [stops]
        of_prompt = {name: given.pop(name) for name in [*given] if name in _OF_PROMPT}
        # The options, the same for all prompts, are written and read once.
        write_options(shared := pb.GenerateRequest(), given)
        facts = self._program.model_facts()
        ask = typed_ask(codec.ask_of(shared, facts, Origin(time.monotonic())), shared.structured_output)
        inputs = (_input(name, prompt, bool(chat), of_prompt, facts) for name, prompt in prompts)
        return [structs.replace(ask, input=each) for each in inputs]

    def _deltas(self, ask: Ask) -> Iterator[OutputDelta]:
        # A generator refers to this LLM, so that the LLM stays open while the stream is read.
        yield from self._program.iterate(self._program.stream(ask))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def _in_keywords() -> Iterator[None]:
    """Replace flags of `serve` by keywords in a StartupError of the block."""
    try:
        yield
    except StartupError as error:
        error.message, error.field = in_keywords(error.message), in_keywords(error.field)
        error.args = (error.message,)
        raise


def _listed(prompts: Any) -> list[tuple[str, Any]]:
    """Return the prompts, each with its name for errors."""
    if isinstance(prompts, str):
        return [("prompts", prompts)]
    listed = plain(prompts)
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray | memoryview):
        raise InvalidRequest(
            f"prompts must be a text or a list of prompts, got {type(prompts).__name__}", field="prompts"
        )
    if len(listed) and isinstance(plain(listed[0]), int | float):
        raise InvalidRequest("a single prompt of ids must be a list in a list: [[1, 2, 3]]", field="prompts")
    if len(listed) and isinstance(listed[0], Mapping):
        raise InvalidRequest("a single conversation must be a list in a list: [[{...}, {...}]]", field="prompts")
    return [(f"prompts[{index}]", prompt) for index, prompt in enumerate(listed)]


def _input(name: str, prompt: Any, chat: bool, options: Mapping[str, Any], facts: ModelFacts) -> Any:
    """Return the input that the server would read from a client's request with this prompt and its options.

    Errors call the prompt `name`.
    """
    if not (chat or options or isinstance(prompt, str)):
        # 2,048 ids take 50 µs here, 200 µs as a request.
        with suppress(ValidationError):
            return IdsInput(convert(prompt, tuple[int, ...]))
    return codec.input_of(_request(name, prompt, chat, options), facts)


def _request(name: str, prompt: Any, chat: bool, options: Mapping[str, Any]) -> pb.GenerateRequest:
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    request = pb.GenerateRequest()
    try:
        write_prompt(request, prompt)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from None
    except TypeError:
        raise InvalidRequest(f"{name}: must be one prompt, is a list of lists or of texts", field=name) from None
    if chat and request.WhichOneof("input") != "chat":
        raise InvalidRequest(f"{name}: a chat is a text or a list of messages", field=name)
    write_options(request, options)
    return request


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(plain(value), bool | None):
        raise InvalidRequest(f"{name}: must be True or False, is {value!r}", field=name)


def _has_use(asks: Sequence[Ask]) -> bool:
    """Return whether a progress bar is worth drawing."""
    return len(asks) > 1 and sys.stderr.isatty()


def _completions(
    prompt_index: int, result: Result, message_type: type | None, object_type: ObjectType | None
) -> Iterator[Completion]:
    prompt_scores = tuple(result.prompt_scores)
    for output in result.outputs:
        usage = output.usage or OutputUsage()
        yield Completion(
            text=output.text,
            token_ids=output.token_ids,
            finish_reason=output.finish.reason if output.finish else FinishReason.UNSPECIFIED,
            prompt_index=prompt_index,
            output_index=output.index,
            prompt_tokens=result.usage.prompt_tokens,
            cached_prompt_tokens=result.usage.cached_prompt_tokens,
            first_token_s=result.timing.first_token_s,
            total_s=result.timing.total_s,
            scores=tuple(output.scores),
            prompt_scores=prompt_scores,
            reasoning=output.reasoning,
            content=output.content,
            tool_calls=output.tool_calls,
            draft_tokens=usage.draft_tokens,
            accepted_draft_tokens=usage.accepted_draft_tokens,
            message=message_of(output, message_type) if message_type is not None else None,
            _parsed=object_of(output, object_type) if object_type is not None else None,
        )
