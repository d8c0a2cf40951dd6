"""A server scripted by a test: generated stubs and the real wire, without a model."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc, model_pb2, model_pb2_grpc

READINESS = "photon_grpc.v1.InferenceService"


@dataclass
class Refusal(Exception):
    """The end of a call: a status, its details and its trailers."""

    code: grpc.StatusCode
    message: str = "no"
    details: list[Any] = field(default_factory=list)
    trailers: tuple[tuple[str, str], ...] = ()

    def all_trailers(self) -> tuple[tuple[str, Any], ...]:
        if not self.details:
            return self.trailers
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return (*self.trailers, ("grpc-status-details-bin", status.SerializeToString()))


def error_info(reason: str, domain: str = "photon-grpc", **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata=metadata)


def message(text: str = "", *, start: bool = False, finish: int = 0, index: int = 0) -> pb.StreamGenerateResponse:
    response = pb.StreamGenerateResponse()
    if start:
        response.start.request_id, response.start.model, response.start.seed = "r-1", "demo", 7
        response.start.release = "0.1.0"
    delta = response.deltas.add(index=index, text=text)
    if finish:
        delta.finish.reason = finish
        response.usage.prompt_tokens, response.usage.output_tokens = 5, 3
        response.timing.first_token_duration.FromMilliseconds(12)
    return response


def typed(whole: Message) -> pb.TypedMessage:
    """Return a message as a server sends it."""
    packed = AnyMessage()
    packed.Pack(whole)
    return pb.TypedMessage.FromString(packed.SerializeToString())


class FakeServer(
    inference_pb2_grpc.InferenceServiceServicer, model_pb2_grpc.ModelServiceServicer, health_pb2_grpc.HealthServicer
):
    """A servicer that answers each attempt with the next entry of `script`, and repeats the last one."""

    def __init__(self, *script: Any) -> None:
        self.script = script or ([message("ok", start=True, finish=pb.FINISH_REASON_EOS)],)
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        #: Set when a call has left its servicer.
        self.ended = asyncio.Event()
        self.ready = True
        self.watchers = 0
        self.is_stopping = False
        self.state: Any = model_pb2.MODEL_STATE_READY
        self.features: list[Any] = [model_pb2.FEATURE_TEXT, model_pb2.FEATURE_CHAT]
        #: The release that answers say.
        self.release = "0.1.0"
        self.target = ""

    async def StreamGenerate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        try:
            for step in await self._next(request, context):
                if step == "hang":
                    await asyncio.sleep(60)
                elif step == "headers":
                    await context.send_initial_metadata(())
                elif isinstance(step, Refusal):
                    await context.abort(step.code, step.message, step.all_trailers())
                else:
                    yield step
        finally:
            self.ended.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        response = pb.GenerateResponse(request_id="r-1", model="demo", seed=7, release=self.release)
        response.usage.output_tokens = 3
        try:
            for step in await self._next(request, context):
                if step == "hang":
                    await asyncio.sleep(60)
                if isinstance(step, Refusal):
                    await context.abort(step.code, step.message, step.all_trailers())
                response.outputs.extend(step.deltas)
        finally:
            self.ended.set()
        return response

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Any) -> model_pb2.ListModelsResponse:
        names = ["first", "second", "third"]
        index = int(request.page_token or 0)
        more = str(index + 1) if index + 1 < len(names) else ""
        return model_pb2.ListModelsResponse(models=[model_pb2.Model(name=names[index])], next_page_token=more)

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Any) -> model_pb2.GetModelResponse:
        if request.model not in ("", "demo"):
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no model {request.model}",
                Refusal(grpc.StatusCode.NOT_FOUND, details=[error_info("MODEL_NOT_FOUND")]).all_trailers(),
            )
        found = model_pb2.Model(name="demo", aliases=["d"], state=self.state, max_context_tokens=4096, vocab_size=512)
        found.features.extend(self.features)
        found.limits.max_stop_strings = 64
        return model_pb2.GetModelResponse(model=found)

    async def Tokenize(self, request: model_pb2.TokenizeRequest, context: Any) -> model_pb2.TokenizeResponse:
        self.requests.append(request)
        return model_pb2.TokenizeResponse(token_ids=[1, 2, 3], token_count=3)

    async def Detokenize(self, request: model_pb2.DetokenizeRequest, context: Any) -> model_pb2.DetokenizeResponse:
        self.requests.append(request)
        return model_pb2.DetokenizeResponse(text="abc")

    async def Check(self, request: Any, context: Any) -> Any:
        assert request.service == READINESS
        serving = health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse(
            status=serving if self.ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        sent = None
        self.watchers += 1
        try:
            while not self.is_stopping:
                if sent is not self.ready:
                    sent = self.ready
                    yield await self.Check(request, context)
                await asyncio.sleep(0.005)
        finally:
            self.watchers -= 1

    async def _next(self, request: Any, context: Any) -> list[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return self.script[min(len(self.requests), len(self.script)) - 1]


@asynccontextmanager
async def serving(
    fake: FakeServer, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[FakeServer]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(fake, server)
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    fake.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    await server.start()
    try:
        yield fake
    finally:
        # A Watch that the stop cancels would be logged.
        fake.is_stopping = True
        while fake.watchers:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await server.stop(None)


@contextmanager
def serving_in_a_thread(*script: Any, credentials: grpc.ServerCredentials | None = None) -> Iterator[FakeServer]:
    """Run the server in a thread, for callers without an event loop and for other processes."""
    started = threading.Event()
    served: list[FakeServer] = []
    stopping: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving(FakeServer(*script), credentials=credentials) as fake:
            served.append(fake)
            stopping.append((asyncio.get_running_loop(), stop))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    with _silent_on_stderr(thread):
        thread.start()
        started.wait()
        try:
            yield served[0]
        finally:
            loop, stop = stopping[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join()


@contextmanager
def _silent_on_stderr(thread: threading.Thread) -> Iterator[None]:
    """Keep the thread from printing tracebacks between what a caller in this process prints.

    gRPC's server prints one for a call, such as a health check, whose caller closes its channel before it was begun.
    """
    print_exc = traceback.print_exc

    def elsewhere(*args: Any, **options: Any) -> None:
        if threading.current_thread() is not thread:
            print_exc(*args, **options)

    with patch.object(traceback, "print_exc", elsewhere):
        yield
