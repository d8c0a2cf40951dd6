"""The outputs of a request before their first token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from photon_grpc.core.ask import Ask, ChatInput
from photon_grpc.core.logprobs import NO_LOGPROBS
from photon_grpc.core.request import Request
from photon_grpc.frontend.fair_turns import FairTurns
from photon_grpc.frontend.model import ServedModel
from photon_grpc.frontend.output.call_ids import CallIds
from photon_grpc.frontend.output.detokenizer import Detokenizer
from photon_grpc.frontend.output.logprobs import NO_OUTPUT_LOGPROBS, OutputLogprobs
from photon_grpc.frontend.output.output import Ending, OutputText
from photon_grpc.frontend.output.stop_strings import StopMatcher, StopStrings
from photon_grpc.frontend.output.typed_output import TypedOutput

#: Ids that are replayed before other calls get their turn; they take about 2 ms.
_REPLAY_SLICE = 1024
#: Limits of the requests that wait to be replayed, and of their ids.
_MAX_REPLAYS, _MAX_REPLAYED_IDS = 4096, 2**25


async def outputs_of(ask: Ask, request: Request, model: ServedModel, replays: FairTurns) -> tuple[OutputText, ...]:
    """Make the outputs of a request; replay the ids that it continues from in a turn of `replays`.

    Raise InvalidRequest if one of these ids follows the end of the output, QueueFull.
    """
    stops = StopStrings(ask.stop.stop_strings) if ask.stop.stop_strings else None
    outputs = tuple([_output(index, ask, request, model, stops) for index in range(request.num_outputs)])
    if request.continued_ids:
        async with replays.turn(ask.origin.caller, len(request.continued_ids)):
            await _replay(outputs[0], request.continued_ids)
    return outputs


async def _replay(output: OutputText, ids: Sequence[int]) -> None:
    for at in range(0, len(ids), _REPLAY_SLICE):
        output.replay(ids[at : at + _REPLAY_SLICE])
        await asyncio.sleep(0)


def replay_turns() -> FairTurns:
    """Return turns for one request at a time, so that a turn of the event loop replays at most one slice."""
    return FairTurns(1, "outputs wait to be continued", max_jobs=_MAX_REPLAYS, max_bytes=_MAX_REPLAYED_IDS)


def _output(index: int, ask: Ask, request: Request, model: ServedModel, stops: StopStrings | None) -> OutputText:
    wants_text = model.tokenizer is not None and ask.output.text is not False
    is_chat = isinstance(ask.input, ChatInput)
    logprobs = _logprobs(request, model)
    include_stop, stop = ask.stop.include_stop_in_text, request.stop
    kind: Callable[..., OutputText] = OutputText
    if ask.constraint is not None and ask.constraint.kind == "protobuf":
        kind = partial(TypedOutput, token_bytes=model.token_bytes)
    return kind(
        index,
        detokenizer=_detokenizer(ask, request, model) if wants_text or stops is not None else None,
        matcher=StopMatcher(stops, include_stop_in_text=include_stop) if stops is not None else None,
        wants_text=wants_text,
        wants_ids=ask.output.token_ids,
        scores=logprobs,
        parser=model.answer_parser(ask.input, request.prompt_ids, _call_ids(request, index))
        if wants_text and is_chat
        else None,
        ending=Ending(frozenset(stop.eos_token_ids + stop.stop_token_ids), stop.min_tokens, include_stop),
    )


def _call_ids(request: Request, index: int) -> CallIds:
    return CallIds(request.request_id, index, len(request.prompt_ids))


def _logprobs(request: Request, model: ServedModel) -> OutputLogprobs:
    if request.logprobs is NO_LOGPROBS:
        return NO_OUTPUT_LOGPROBS
    return OutputLogprobs(request.logprobs.num_records, model.token_bytes)


def _detokenizer(ask: Ask, request: Request, model: ServedModel) -> Detokenizer | None:
    if model.tokenizer is None:
        return None
    return model.tokenizer.detokenizer(
        skip_special_tokens=ask.output.skip_special_tokens, prompt_ids=request.prompt_ids
    )
