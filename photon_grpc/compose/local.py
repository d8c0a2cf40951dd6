"""`LLM`: the same front end and engine as the service has, in one program and without the wire."""

from __future__ import annotations

import inspect
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from photon_grpc.compose.console import bar_of
from photon_grpc.compose.program import Program
from photon_grpc.config.download import fetch_model
from photon_grpc.config.resolve import resolve
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.ask import (
    Ask,
    ChatInput,
    ChatMessage,
    IdsInput,
    OutputAsk,
    SamplingAsk,
    SchedulingAsk,
    StopAsk,
    TextInput,
)
from photon_grpc.frontend.update import Delta, Result

#: One prompt: text, ids, or (with chat) a conversation of {"role": ..., "content": ...}.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One output of one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    #: Which of the prompts, and which of its num_outputs.
    prompt_index: int
    output_index: int
    prompt_tokens: int
    cached_prompt_tokens: int
    #: From arrival to the first token and to the last one.
    first_token_s: float
    total_s: float


class LLM:
    """A model in this program.

    >>> with LLM() as llm:
    ...     print(llm.generate("def fib(n):", max_tokens=32, temperature=0)[0].text)

    `model` is a directory or an id to download (unset: the embedded model); every flag of `serve` is a keyword: `LLM(model, max_num_seqs=8, dtype="bfloat16")`.
    Raises StartupError when a flag or the directory is wrong.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **flags: Any) -> None:
        config = resolve({"model": os.fspath(model) or None, **flags}, os.environ).config
        self._program = Program(fetch_model(config))
        # At the end of the interpreter, too.
        weakref.finalize(self, self._program.close)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        chat: bool = False,
        show_progress: bool | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Completes all prompts, as many at a time as the engine takes; in the order of the prompts, `num_outputs` each.

        `prompts` is one text, or a sequence of texts, of sequences of ids, or with `chat` of texts (the user's message) or
        conversations. `options` are those of `make_ask`. `show_progress`: unset, a bar on a terminal when there are several prompts.
        Raises PhotonError for the first prompt that is refused; the others are aborted.
        """
        _check(options)
        asks = [make_ask(prompt, chat=chat, **options) for prompt in _as_list(prompts)]
        if show_progress is None:
            show_progress = len(asks) > 1 and sys.stderr.isatty()
        with bar_of("prompts", len(asks), show_progress) as advance:
            results = self._program.wait(self._program.generate(asks, advance))
        return [completion for index, result in enumerate(results) for completion in _completions(index, result)]

    def stream(self, prompt: Prompt, *, chat: bool = False, **options: Any) -> Iterator[Delta]:
        """What is new, as it is generated: `for delta in llm.stream("def "): print(delta.text, end="")`.

        Leaving the loop aborts the rest. Options as for `make_ask`; raises PhotonError.
        """
        _check(options)
        return self._deltas(make_ask(prompt, chat=chat, **options))

    def close(self) -> None:
        """Ends the engine and gives back its memory. Calls and streams in flight, and all that come, raise Closed.

        Safe from any thread, from a loop over `stream` and from a signal handler; may be called again.
        """
        self._program.close()

    def _deltas(self, ask: Ask) -> Iterator[Delta]:
        # Its frame refers to this LLM, which a stream that is being read keeps open.
        yield from self._program.iterate(self._program.stream(ask))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_ask(
    prompt: Prompt,
    *,
    chat: bool = False,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    num_outputs: int | None = None,
    stop_strings: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    include_stop_in_text: bool = False,
    skip_special_tokens: bool = True,
    max_duration_s: float | None = None,
    priority: int = 0,
) -> Ask:
    """The options have the names and meanings of the protos; None is the model's default, then the neutral value."""
    stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    return Ask(
        input=_input(prompt, chat),
        arrival_s=time.monotonic(),
        sampling=SamplingAsk(temperature, top_p, top_k, min_p, seed, num_outputs),
        stop=StopAsk(
            max_tokens, min_tokens, stops, tuple(stop_token_ids), ignore_eos, include_stop_in_text, max_duration_s
        ),
        output=OutputAsk(token_ids=True, skip_special_tokens=skip_special_tokens),
        scheduling=SchedulingAsk(priority=priority),
    )


def _check(options: dict[str, Any]) -> None:
    """Raises TypeError naming what there is no option of."""
    known = inspect.signature(make_ask).parameters.keys() - {"prompt", "chat"}
    for name in options.keys() - known:
        raise TypeError(f"there is no option {name}; there are {', '.join(sorted(known))}")


def _as_list(prompts: str | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        raise InvalidRequest("one prompt of ids is a list within the list: [[1, 2, 3]]", field="prompts")
    return prompts


def _input(prompt: Prompt, chat: bool) -> TextInput | IdsInput | ChatInput:
    if not chat:
        return TextInput(prompt) if isinstance(prompt, str) else IdsInput(tuple(prompt))  # type: ignore[arg-type]
    turns: Sequence[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return ChatInput(tuple(ChatMessage(**turn) for turn in turns))
    except TypeError as error:
        raise InvalidRequest(f"a turn of a conversation is a role and a content: {error}", field="prompts") from error


def _completions(prompt_index: int, result: Result) -> Iterator[Completion]:
    for output in result.outputs:
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
        )
