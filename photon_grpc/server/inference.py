"""photon_grpc.v1.InferenceService: a message becomes an Ask, what the front end says becomes messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from photon_grpc.errors import FeatureNotSupported
from photon_grpc.frontend.ask import Ask
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.server import codec, metadata, scores
from photon_grpc.server.metadata import Context
from photon_grpc.server.writer import StreamWriter
from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Errors are raised, not mapped: the interceptor `errors` does that for all services."""

    def __init__(self, frontend: Frontend, writer: StreamWriter) -> None:
        self._frontend = frontend
        self._writer = writer

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        ask = self._ask(request, context)
        del request  # megabytes, perhaps, for as long as it runs
        result = await self._frontend.generate(ask)
        response = codec.generate_response(result)
        if ask.output.is_scored:
            await scores.add_to_response(response, result)
        await metadata.send_request_id(context)
        return response

    async def StreamGenerate(  # type: ignore[override]  # a coroutine that writes: cheaper than a generator
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        ask = self._ask(request, context)
        del request  # megabytes, perhaps, for as long as it runs
        stream, is_scored = await self._frontend.stream(ask), ask.output.is_scored
        del ask
        try:
            sequence = 0
            async for update in stream:
                sequence += 1
                message = codec.stream_message(update, sequence, stream.start if sequence == 1 else None)
                if is_scored:
                    await scores.add_to_message(message, update)
                if sequence == 1:
                    await metadata.send_request_id(context)
                await self._writer.write(context, message)
        finally:
            # Also when the call was cancelled, ran out of time or lost its connection: what still runs is aborted.
            stream.close()

    async def MultiplexGenerate(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.MultiplexGenerateRequest], context: Context
    ) -> None:
        raise FeatureNotSupported(
            "MultiplexGenerate is not supported yet (FEATURE_MULTIPLEX)", field="MultiplexGenerate"
        )

    def _ask(self, request: pb.GenerateRequest, context: Context) -> Ask:
        arrival_s = time.monotonic()
        if request.request_id:
            metadata.rename_call(request.request_id, "request_id")
        return codec.ask_of(
            request,
            self._frontend.model(request.model),
            request_id=metadata.request_id(),
            arrival_s=arrival_s,
            deadline_s=metadata.deadline_s(context),
            replaces=metadata.is_retry(context),
            owner=metadata.owner(),
        )
