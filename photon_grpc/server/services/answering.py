"""Methods of callers' services: a request becomes a prompt, and the constrained answer the response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from photon_grpc.core.ask import Ask, ChatInput, Origin, StopAsk, TextInput
from photon_grpc.core.generation import Start, Timing, Usage
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import AnswerIncomplete, AnswerInvalid, InternalFailure, PromptTooLong, frames_of
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.output.typed_output import COMPLETE
from photon_grpc.frontend.output.update import Result, Update
from photon_grpc.frontend.stream import TokenStream
from photon_grpc.server.calls import methods
from photon_grpc.server.calls.call import current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.services.prompt_form import PromptForm
from photon_grpc.server.services.service_set import NO_SERVICES, ServedMethod, ServiceSet
from photon_grpc.server.wire import codec
from photon_grpc.server.wire.writer import StreamWriter

_LOG = logging.getLogger(__name__)

#: A serialized GenerateResponse without outputs: ids, model, usage, timing.
USAGE_KEY = "x-photon-usage-bin"
#: Of calls without a deadline.
DEFAULT_DEADLINE_S = 120.0
#: Where the context is several times as long; else an answer may take what the prompt leaves of it.
DEFAULT_MAX_TOKENS = 2048
_CONTEXT_SHARE = 4
#: Larger messages are written and parsed in a thread, as those of typed output.
_LARGE_BYTES = 4096


class OtherServices(NamedTuple):
    """The services beside our own, and the form of their prompts."""

    services: ServiceSet
    form: PromptForm


NO_OTHERS = OtherServices(NO_SERVICES, PromptForm(None))


class Answering:
    """The methods of a ServiceSet, answered by one front end. They raise errors, as all behind the Guard do."""

    def __init__(self, services: ServiceSet, frontend: Frontend, writer: StreamWriter, form: PromptForm) -> None:
        self._services = services
        self._frontend = frontend
        self._writer = writer
        self._form = form

    def handlers(self) -> Iterator[grpc.GenericRpcHandler]:
        """Yield one handler for each service."""
        found: dict[str, dict[str, Any]] = defaultdict(dict)
        for method in self._services.methods:
            found[method.service][method.name] = self._handler(method)
        return (grpc.method_handlers_generic_handler(service, each) for service, each in found.items())

    def methods(self) -> dict[str, methods.Method]:
        """Return the methods by path, for the Guard."""
        return {
            each.path: methods.others(each.service, each.name, server_streaming=each.is_stream)
            for each in self._services.methods
        }

    def _handler(self, method: ServedMethod) -> Any:
        parse, write = method.request_class.FromString, _serialized
        if method.is_stream:
            return grpc.unary_stream_rpc_method_handler(_streaming(self, method), parse, write)
        return grpc.unary_unary_rpc_method_handler(partial(self.answer, method), parse, write)

    async def answer(self, method: ServedMethod, request: Message, context: Context) -> Message:
        """Answer a unary call. Raise PhotonError."""
        origin = _origin(method)
        ask = await self._ask(method, request, origin)
        try:
            result = await self._frontend.generate(ask)
        except PromptTooLong as error:
            _too_long(error, method, request)
        _report_usage(result.start, result.usage, result.timing)
        finish = result.outputs[0].finish
        if finish is None or finish.reason not in COMPLETE:
            raise _incomplete(finish.reason if finish else None, result.usage)
        message = await _parsed(method, finish.message_json)
        await current().send_initial_metadata(context)
        return message

    async def stream(self, method: ServedMethod, request: Message, context: Context) -> None:
        """Answer with a stream of messages, each sent once it is complete. Raise PhotonError."""
        ask = await self._ask(method, request, _origin(method))
        try:
            stream = await self._frontend.stream(ask)
        except PromptTooLong as error:
            _too_long(error, method, request)
        async with stream:
            await self._write(method, stream, context)

    async def _write(self, method: ServedMethod, stream: TokenStream, context: Context) -> None:
        rest, is_first, last = "", True, Update(())
        async for last in stream:
            *lines, rest = (rest + "".join([delta.text for delta in last.deltas])).split("\n")
            for line in lines:
                message = await _parsed(method, line.encode())
                if is_first:
                    await current().send_initial_metadata(context)
                    is_first = False
                await self._writer.write(context, message.SerializeToString())
        usage, timing = last.usage or Usage(), last.timing or Timing()
        _report_usage(stream.start, usage, timing)
        finish = last.deltas[-1].finish if last.deltas else None
        if finish is None or finish.reason not in COMPLETE:
            raise _incomplete(finish.reason if finish else None, usage)

    async def _ask(self, method: ServedMethod, request: Message, origin: Origin) -> Ask:
        """Return what the front end is asked for. Raise InvalidRequest."""
        try:
            input = await _in_turn(request.ByteSize(), self._input, method, request)
        except BaseException as error:
            self._frontend.refused(origin, error)
            raise
        return Ask(
            input=input,
            origin=origin,
            sampling=method.options.sampling,
            stop=StopAsk(max_tokens=method.options.max_tokens or self._max_tokens()),
            constraint=method.constraint,
            replaces=current().is_retry,
        )

    def _input(self, method: ServedMethod, request: Message) -> ChatInput | TextInput:
        method.rules.check_request(request)
        return self._form.input(method, method.request_text.write(request))

    def _max_tokens(self) -> int | None:
        context = self._frontend.model("").max_context_tokens
        return DEFAULT_MAX_TOKENS if context >= _CONTEXT_SHARE * DEFAULT_MAX_TOKENS else None


def _streaming(answering: Answering, method: ServedMethod) -> Any:
    # The Guard looks whether it is a coroutine function, which a partial is not everywhere.
    async def stream(request: Message, context: Context) -> None:
        await answering.stream(method, request, context)

    return stream


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()


def _origin(method: ServedMethod) -> Origin:
    call = current()
    call.is_request = True
    origin = call.origin(f"{method.service}/{method.name}")
    if origin.deadline_s is None:
        origin.deadline_s = origin.arrival_s + DEFAULT_DEADLINE_S
    return origin


async def _in_turn(num_bytes: int, work: Any, *arguments: Any) -> Any:
    """Return the result of `work`, done in a thread if it takes long."""
    return await asyncio.to_thread(work, *arguments) if num_bytes > _LARGE_BYTES else work(*arguments)


async def _parsed(method: ServedMethod, text: bytes) -> Message:
    """Return the message. Raise AnswerInvalid; or InternalFailure, without the text, which quotes the output."""
    try:
        message: Message = await _in_turn(len(text), _parse, method, text)
    except AnswerInvalid:
        raise
    except Exception as error:
        name = method.response_class.DESCRIPTOR.full_name
        _LOG.error("a complete answer is not a %s, %s\n%s", name, type(error).__name__, frames_of(error))
        raise InternalFailure("internal error: the answer cannot be parsed as its message") from None
    return message


def _parse(method: ServedMethod, text: bytes) -> Message:
    message: Message = ParseDict(json.loads(text), method.response_class())
    method.rules.check_answer(message)
    return message


def _report_usage(start: Start, usage: Usage, timing: Timing) -> None:
    response = codec.generate_response(Result(start, (), usage, timing))
    current().trailers = ((USAGE_KEY, response.SerializeToString()),)


def _incomplete(reason: FinishReason | None, usage: Usage) -> AnswerIncomplete:
    why = reason.name if reason else "no reason"
    text = f"the answer was cut after {usage.output_tokens} tokens ({why}), before its message was complete"
    return AnswerIncomplete(text, needed=None, limit=usage.output_tokens)


def _too_long(error: PromptTooLong, method: ServedMethod, request: Message) -> NoReturn:
    """Raise PromptTooLong again, naming the field that takes most."""
    name = method.request_text.largest_field(request)
    where = f"; the largest field of the request is {name}" if name else ""
    raise PromptTooLong(f"{error}{where}", field=name, needed=error.needed, limit=error.limit) from None
