"""The asyncio client, with typed calls and failures as exceptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon_grpc.client.answer_types import answer_types
from photon_grpc.client.channel import MAX_RETRIES, open_channel
from photon_grpc.client.descriptor_sets import DescriptorSets
from photon_grpc.client.generation import Generation, read_generation
from photon_grpc.client.many import CONCURRENCY, check, hedged, ordered, persist, unordered
from photon_grpc.client.message_type import M
from photon_grpc.client.model import Model, read_model
from photon_grpc.client.multiplex import Multiplex, MultiplexGenerateCall
from photon_grpc.client.newer_fields import NewerFields
from photon_grpc.client.options import build_request, write_chat_options, write_prompt
from photon_grpc.client.resume import ResumingCall
from photon_grpc.client.retry_policy import DEFAULT_TIMEOUT_S, RetryPolicy
from photon_grpc.client.status import Unreachable, to_error
from photon_grpc.client.stream import MessageCall, Stream
from photon_grpc.client.trace_context import Metadata, with_trace_context
from photon_grpc.client.typed import growing_messages, message_of
from photon_grpc.core.fields import ChatOptions, Options
from photon_grpc.core.generation import Prompt
from photon_grpc.errors import DeadlinePassed, ModelLoading, PhotonError
from photon_grpc.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

#: The health service's name for readiness: a request sent now would run.
READINESS = "photon_grpc.v1.InferenceService"

T = TypeVar("T")


class Client:
    """A client for one server, or for one name with several servers. Calls may be concurrent, in one event loop.

    `target` is HOST:PORT, unix:PATH or any name that gRPC resolves. Without `credentials` the connection is plain text.
    A call that fails with a code of clients/service_config.json before anything was received is retried up to `retries`
    times, at most 4. A stream that is cut off later continues at a ready server (`resume`). Generations go to ready
    servers; calls about models and readiness go to any. A call without `timeout` uses the client's, in seconds. Every
    call carries `metadata` and, unless it has a traceparent, the current OpenTelemetry span.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        retries: int = MAX_RETRIES,
        resume: bool = True,
        timeout: float = DEFAULT_TIMEOUT_S,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.target = target
        self._credentials = credentials
        self._retries = retries
        self._policy = RetryPolicy(max_retries=retries if resume else 0, resumes=resume, timeout_s=timeout)
        self._metadata = tuple(metadata)
        #: Whether it uses only ready servers -> the channel.
        self._channels: dict[bool, grpc.aio.Channel] = {}
        self._newer_fields = NewerFields(self._default_model, target)
        self._sets = DescriptorSets(self._newer_fields)

    async def generate(
        self, prompt: Prompt, *, hedge_after: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """Return the whole result. `timeout` ends the call on both sides, and so does cancelling the task.

        If there is no answer after `hedge_after` seconds, the request is sent again, to the next server. The first
        answer is returned, and the other call is cancelled.
        """
        request = build_request(prompt, options)
        if hedge_after is None:
            return await self._generate(request, options)
        other = inference_pb2.GenerateRequest()
        other.CopyFrom(request)
        if request.request_id:
            other.request_id = f"{request.request_id}-hedge"
        return await hedged(lambda again: self._generate(other if again else request, options), hedge_after)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Return a stream of the result as it is produced; see Stream."""
        request = build_request(prompt, options)
        # Kept for resumed calls, when another span may be current.
        open_call = partial(self._open_stream, metadata=self._call_metadata())
        policy = replace(self._policy, is_after_grpc=True)

        def start(timeout_s: float) -> MessageCall:
            detached = self._sets.detach(request, options.get("message_type"))
            checked = self._newer_fields.opener(request, detached.opener(open_call))
            return ResumingCall(request, checked, self.target, timeout_s, policy)

        call = self._newer_fields.opened(request, start, policy.timeout_of(options.get("timeout")))
        return Stream(call, self.target, answer_types(options))

    async def generate_message(self, prompt: Prompt, message_type: type[M], /, **options: Unpack[Options]) -> M:
        """Return a message of a generated class, with `generate`'s options. Raise MessageMismatch if it is cut off."""
        typed: Options = {**options, "message_type": message_type}
        return message_of(await self.generate(prompt, **typed), message_type)

    def stream_messages(
        self, prompt: Prompt, message_type: type[M], /, **options: Unpack[Options]
    ) -> AsyncGenerator[M, None]:
        """Yield ever more of one output's message, the whole one last. Raise MessageMismatch if it is cut off."""
        typed: Options = {**options, "message_type": message_type, "num_outputs": 1}
        return growing_messages(self.stream(prompt, **typed), message_type)

    def map(
        self, prompts: Iterable[Prompt], *, concurrency: int = CONCURRENCY, **options: Unpack[Options]
    ) -> AsyncGenerator[Generation, None]:
        """Yield the results in the order of the prompts, which are read as needed, `concurrency` at a time.

        Requests to a full server are repeated without limit, when it allows; to a lost one for a while. Any other
        failure is raised in its place and ends the rest. Raise TypeError for a bare text, ValueError for a concurrency
        below 1.
        """
        check(prompts, concurrency)
        return ordered(lambda prompt: persist(lambda: self.generate(prompt, **options)), prompts, concurrency)

    def map_unordered(
        self, prompts: Iterable[Prompt], *, concurrency: int = CONCURRENCY, **options: Unpack[Options]
    ) -> AsyncGenerator[tuple[int, Generation], None]:
        """Yield (index of the prompt, result) as `map` does, but in the order in which they end."""
        check(prompts, concurrency)
        return unordered(lambda prompt: persist(lambda: self.generate(prompt, **options)), prompts, concurrency)

    def multiplex(self) -> Multiplex:
        """Return many requests on one stream, all of the current span, as a context manager; see Multiplex."""
        metadata = self._call_metadata()

        def open_call() -> MultiplexGenerateCall:
            return self._inference.MultiplexGenerate(metadata=metadata)

        return Multiplex(open_call, self.target, self._policy, self._newer_fields, self._sets)

    async def models(self) -> list[Model]:
        """Return every served model, the default one first."""
        found: list[Model] = []
        page = model_pb2.ListModelsRequest()
        while True:
            response = await self._unary(self._models.ListModels, page)
            found += [read_model(model) for model in response.models]
            if not response.next_page_token:
                return found
            page.page_token = response.next_page_token

    async def model(self, name: str = "") -> Model:
        """Return a model; "" is the default one. Raise ModelNotFound."""
        request = model_pb2.GetModelRequest(model=name)
        return read_model((await self._unary(self._models.GetModel, request)).model)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        parse_special_tokens: bool = False,
        add_special_tokens: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Return the ids that `generate` would see for a text or a list of chat messages, with options of a chat.

        Without `add_special_tokens`, leave out BOS and whatever else is added around a text.
        """
        request = model_pb2.TokenizeRequest(
            model=model,
            parse_special_tokens=parse_special_tokens,
            add_special_tokens=None if add_special_tokens else False,
        )
        write_prompt(request, prompt)
        write_chat_options(request, chat)
        left_s = await self._newer_fields.check(request, self._policy.timeout_s)
        return tuple((await self._unary(self._models.Tokenize, request, left_s)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None
    ) -> str:
        """Return the text of token ids."""
        request = model_pb2.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
        request.token_ids.ids.extend(token_ids)
        return (await self._unary(self._models.Detokenize, request)).text

    async def is_ready(self) -> bool:
        """Return whether a request sent now would run. Raise Unreachable if no server answers."""
        return await self._is_ready(self._policy.timeout_s)

    async def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until a request sent now would run. Raise Unreachable or ModelLoading after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        missing: PhotonError = Unreachable(f"no answer from {self.target} within {timeout_s:g} s")
        while time.monotonic() < deadline:
            try:
                if await self._is_ready(deadline - time.monotonic()):
                    async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                        await self._channel(only_ready=True).channel_ready()
                    return
                missing = ModelLoading(f"{self.target} was not ready within {timeout_s:g} s")
            except Unreachable as error:
                missing = error
            except (DeadlinePassed, TimeoutError):
                pass
            await asyncio.sleep(0.1)
        raise missing

    async def close(self) -> None:
        """Cancel what still runs and close the connection; the next call opens another."""
        self._sets.forget()
        channels, self._channels = self._channels, {}
        self._newer_fields.forget()
        for channel in channels.values():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self._channel(only_ready=True))

    @property
    def _models(self) -> model_pb2_grpc.ModelServiceAsyncStub:
        return model_pb2_grpc.ModelServiceStub(self._channel(only_ready=False))

    def _channel(self, *, only_ready: bool) -> grpc.aio.Channel:
        # Opened on first use, since a channel belongs to the event loop that runs then.
        if only_ready not in self._channels:
            self._channels[only_ready] = open_channel(
                self.target, credentials=self._credentials, retries=self._retries, only_ready=only_ready
            )
        return self._channels[only_ready]

    async def _is_ready(self, timeout_s: float) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(self._channel(only_ready=False))
        request = health_pb2.HealthCheckRequest(service=READINESS)
        response = await self._raised(stub.Check(request, timeout=timeout_s))
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def _generate(self, request: inference_pb2.GenerateRequest, options: Options) -> Generation:
        left_s = await self._newer_fields.check(request, self._policy.timeout_of(options.get("timeout")))
        detached = self._sets.detach(request, options.get("message_type"))
        response = await detached.answer(self._send_generate, request, left_s)
        self._newer_fields.check_answer(request, response.release)
        return read_generation(response, answer_types(options))

    async def _send_generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float
    ) -> inference_pb2.GenerateResponse:
        return await self._raised(self._inference.Generate(request, timeout=timeout_s, metadata=self._call_metadata()))

    async def _default_model(self) -> model_pb2.GetModelResponse:
        return await self._unary(self._models.GetModel, model_pb2.GetModelRequest())

    def _open_stream(
        self, request: inference_pb2.GenerateRequest, timeout_s: float, *, metadata: Metadata
    ) -> MessageCall:
        return self._inference.StreamGenerate(request, timeout=timeout_s, metadata=metadata)

    def _call_metadata(self) -> Metadata:
        return with_trace_context(self._metadata)

    async def _unary(self, method: Callable[..., Awaitable[T]], request: Message, timeout_s: float | None = None) -> T:
        timeout_s = self._policy.timeout_of(timeout_s)
        return await self._raised(method(request, timeout=timeout_s, metadata=self._call_metadata()))

    async def _raised(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            raise to_error(failure, self.target) from failure
